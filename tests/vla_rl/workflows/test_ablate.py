"""Ablations: gains over base and controls by hand, which runs are made, repeated and refused, and one for real."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_run import make_recipe, save_policy

from sim.dummy import DummyConfig
from vla_rl.cli.options import PROGRAM
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.data.config import DatasetError
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationMeta
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows import jobs as module
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from vla_rl.workflows.sweep import ARMS, LABELS, Ablation, ablate, summarize


def evaluation(name: str, outcomes: str, samples: int = 1) -> Evaluation:
    """One character per episode: 1 success, 0 failure, x lost; `samples` in a row are of one state."""
    meta = EvaluationMeta(
        name=name, env="dummy", split="eval", seed=0, temperatures={"sampled": 1.0}, horizon={"reach": 8},
        cameras=("agentview",), image_size=(32, 32), num_envs=1, protocol="by hand", config={}, created="now",
        wall_seconds=1.0,
    )  # fmt: skip
    episodes = tuple(
        EpisodeRecord(
            mode="sampled",
            task="reach",
            split="eval",
            index=number // samples,
            sample=number % samples,
            success=outcome == "1",
            steps=3,
            lost=outcome == "x",
        )
        for number, outcome in enumerate(outcomes)
    )
    return Evaluation(meta=meta, episodes=episodes)


def runs(*outcomes: str, samples: int = 1) -> list[Evaluation]:
    return [evaluation("final", o, samples) for o in outcomes]


def gain(result: Ablation, of: str, over: str):
    (found,) = [g for g in result.gains if (g.of, g.over) == (of, over)]
    return found


def test_gains_by_hand():
    arms = {
        "none": runs("11000000", "11110000", "11111100"),
        "shuffled_rewards": runs("10000000", "01000000", "00000000"),
        "continue_bc": runs("11000000", "11000000", "11000000"),
    }
    result = summarize("tiny", evaluation("base", "10000000"), arms, (5, 6, 7))
    assert (result.recipe, result.seeds, result.num_episodes) == ("tiny", (5, 6, 7), 8)
    assert result.rates == {
        "base": {"sampled": (0.125,)},
        "RL": {"sampled": (0.25, 0.5, 0.75)},
        "shuffled rewards": {"sampled": (0.125, 0.125, 0.0)},
        "behavior cloning continued": {"sampled": (0.25, 0.25, 0.25)},
    }
    over_base = gain(result, "RL", "base")
    assert over_base.per_seed == (0.125, 0.375, 0.625) and over_base.mean == pytest.approx(0.375)
    # Exact McNemar, nothing lost: 2 * 0.5^gained, for 1, 3 and 5 gained.
    assert over_base.p_values == pytest.approx((1.0, 0.25, 0.0625))
    assert over_base.interval.low < 0.375 < over_base.interval.high
    over_shuffled = gain(result, "RL", "shuffled rewards")
    assert over_shuffled.per_seed == (0.125, 0.375, 0.75)
    assert gain(result, "RL", "behavior cloning continued").per_seed == (0.0, 0.25, 0.5)
    shuffled = gain(result, "shuffled rewards", "base")
    assert shuffled.per_seed == (0.0, 0.0, -0.125) and shuffled.mean == pytest.approx(-0.125 / 3)
    assert shuffled.p_values == (1.0, 1.0, 1.0)
    assert len(result.gains) == 5 and result.gains[0] == over_base


def test_a_state_counts_once_and_lost_episodes_not_at_all():
    base = evaluation("base", "1000xx11", samples=2)  # By state: 0.5, 0, lost, 1.
    arms = {"none": runs("111011x1", "11000011", samples=2)}  # 1, 0.5, 1, 1 and 1, 0, 0, 1.
    result = summarize("tiny", base, arms, (0, 1))
    (over_base,) = result.gains
    assert over_base.per_seed == pytest.approx(((0.5 + 0.5 + 0) / 3, (0.5 + 0 + 0) / 3))
    assert math.isnan(over_base.interval.low), "two seeds carry no interval"
    assert "needs 3 seeds" in list(result.table().columns[3].cells)
    assert result.num_episodes == 6


def test_samples_of_a_state_are_one_piece_of_evidence():
    base, arms = evaluation("base", "0" * 15, samples=5), {"none": runs("1" * 5 + "0" * 10, samples=5)}
    assert summarize("tiny", base, arms, (0,)).gains[0].p_values == (1.0,)


def test_the_table_has_a_row_per_gain():
    arms = {"none": runs("11", "11", "11"), "shuffled_rewards": runs("00", "00", "01")}
    result = summarize("tiny", evaluation("base", "00"), arms, (0, 1, 2))
    table = result.table()
    assert table.row_count == 3 and "3 seeds, n = 2 each" in str(table.title) and table.caption == SEEDS_ALIKE
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    assert "RL - shuffled rewards" in capture.get() and "+100.0" in capture.get()
    assert Ablation.model_validate_json(result.model_dump_json()) == result


# --- which runs are made -------------------------------------------------------------------------


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    sft = f"sft={{datasets: {tmp_path}/demos}}"
    (tmp_path / "demos" / "meta").mkdir(parents=True)
    (tmp_path / "demos" / "meta" / "info.json").touch()
    path.write_text(dump_yaml(make_recipe(tmp_path / "base", sft, "num_threads=2")))
    return path


def call(recipe_file: Path, folder: Path, *overrides: str, seeds=(3, 4), program=PROGRAM, **options) -> Ablation:
    recipe = load_recipe(recipe_file, overrides)
    return ablate(str(recipe_file), recipe, overrides, folder, seeds=seeds, jobs=1, program=program, **options)


@pytest.fixture
def made(monkeypatch) -> list[list[str]]:
    """The commands run; in place of each, its evaluation appears."""
    commands: list[list[str]] = []

    def start(command, **_):
        arguments = command[3:]
        commands.append(arguments)
        folder = Path(arguments[arguments.index("--output") + 1])
        recipe = load_recipe(arguments[1], [a for a in arguments[2:] if "=" in a])
        open_run(recipe, folder, resume="--resume" in arguments)
        name = "base" if arguments[0] == "eval" else "final"
        evaluation(name, "1100" if "none" in folder.name else "1000").save(folder / "evaluations" / f"{name}.json")
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(module, "start_child", start)
    return commands


def test_each_arm_is_run_with_each_seed_from_the_same_recipe(recipe_file, tmp_path, made):
    folder = tmp_path / "ablation"
    result = call(recipe_file, folder, "algo.optim.lr=0.5")
    assert len(made) == 1 + 3 * 2
    assert made[0][:3] == ["eval", str(recipe_file), "algo.optim.lr=0.5"] and made[0][-2:] == ["--name", "base"]
    for seed in (3, 4):
        for arm in ("none", "shuffled_rewards", "continue_bc"):
            recipe = load_recipe(folder / f"{arm}-seed{seed}" / "config.yaml")
            assert (recipe.seed, recipe.train.control, recipe.train.evaluate) == (seed, arm, "after")
            assert recipe.algo.optim.lr == 0.5 and recipe.num_threads == 0  # type: ignore[union-attr]
    assert gain(result, "RL", "shuffled rewards").mean == 0.25
    assert Ablation.model_validate_json((folder / "ablation.json").read_text()).rates == result.rates


def test_finished_runs_are_not_repeated_and_unfinished_ones_resume(recipe_file, tmp_path, made):
    folder = tmp_path / "ablation"
    call(recipe_file, folder)
    made.clear()
    (folder / "none-seed4" / "evaluations" / "final.json").unlink()
    call(recipe_file, folder, seeds=(3, 4, 5))
    assert len(made) == 1 + 3
    resumed = [arguments for arguments in made if "--resume" in arguments]
    assert [arguments[-2] for arguments in resumed] == [str(folder / "none-seed4")]


def test_runs_of_another_recipe_are_not_taken_for_this_ones(recipe_file, tmp_path, made):
    folder = tmp_path / "ablation"
    call(recipe_file, folder)
    made.clear()
    with pytest.raises(
        ConfigError, match=r"base was made by another recipe: there algo\.optim\.lr: 0\.001, here algo\.optim\.lr: 0\.5"
    ):
        call(recipe_file, folder, "algo.optim.lr=0.5")
    assert not made


def test_what_cannot_be_run_is_refused_before_anything_runs(recipe_file, tmp_path, made, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ablation"
    with pytest.raises(ConfigError, match=r"arms \['none', 'shuffle'\], .*arms are \['none', 'shuffled_rewards'"):
        call(recipe_file, folder, arms=("none", "shuffle"))
    with pytest.raises(ConfigError, match="seeds \\[\\]"):
        call(recipe_file, folder, seeds=())
    with pytest.raises(ConfigError, match=r"sft: this recipe has none, .*continue_bc learns from demonstrations"):
        call(recipe_file, folder, "sft=null")
    for missing, advice in (
        ("datasets/none", "vla-rl collect RECIPE"),
        ("datasets/tabletop_habit", "collect tabletop_habit"),
    ):
        with pytest.raises(DatasetError, match=rf"sft\.datasets: /?.*{missing} is not there\. .*{advice}`"):
            call(recipe_file, folder, f"sft.datasets={missing}")
    assert not made and not folder.exists()
    call(recipe_file, folder, "sft=null", arms=("none", "shuffled_rewards"))
    assert len(made) == 5


def test_a_failing_run_names_its_log(recipe_file, tmp_path):
    with pytest.raises(RuntimeError, match=r"`vla-rl eval .*` failed with exit code 1; its output is in .*base\.log"):
        call(recipe_file, tmp_path / "ablation", program=("/bin/false",))
    talking = ("/bin/sh", "-c", "echo begun; echo 'error: env.tasks: no such task' >&2; exit 2")
    with pytest.raises(RuntimeError, match=r"base\.log, which ends with: error: env\.tasks: no such task$"):
        call(recipe_file, tmp_path / "talking", program=talking)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_ablation_end_to_end(tmp_path):
    policy = save_policy(tmp_path / "base")
    demos = CollectConfig(dataset=str(tmp_path / "demos"), episodes_per_task=4)
    collect_dataset(DummyConfig(num_envs=4, tasks=("reach_red",)), demos)
    recipe_file = tmp_path / "tiny.yaml"
    sft = f"sft={{datasets: {tmp_path}/demos, batch_size: 4}}"
    recipe_file.write_text(dump_yaml(make_recipe(policy, sft, "train.iterations=2")))
    result = call(recipe_file, tmp_path / "ablation", seeds=(3,))
    assert result.num_episodes == 4 and set(result.rates) == {"base", *(LABELS[arm] for arm in ARMS)}
    for g in result.gains:
        of, over = (result.rates[label][g.mode][0] for label in (g.of, g.over))
        assert g.per_seed == pytest.approx((of - over,))
    reports = list((tmp_path / "ablation").glob("*-seed3/report.html"))
    assert len(reports) == 3
