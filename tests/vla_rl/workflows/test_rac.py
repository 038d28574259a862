"""Rounds of correcting and training again: what is counted, what is compared, and one run of it all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sim.dummy import DummyConfig
from sim.metaworld.config import MetaWorldConfig
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.interfaces import EnvConfig
from vla_rl.recipe.recipe import load_recipe
from vla_rl.recipe.runs import RacConfig, RacControl
from vla_rl.types import CONTROL_SOURCES, EpisodeSpec
from vla_rl.workflows.rac import RESULTS, _Rounds, _summarize, longer, markdown, run_rac


def outcome(success: bool, recovery: int = 0, correction: int = 0, **more: object) -> dict:
    helped = recovery + correction > 0
    base = {"task": "stack", "index": 0, "success": success, "intervened": helped, "recoveries": int(recovery > 0)}
    base |= {"policy_frames": 9, "recovery_frames": recovery, "correction_frames": correction}
    return base | {"given_up": False, "lost": False} | more


def test_a_round_in_numbers() -> None:
    row = _summarize(
        2,
        [
            outcome(True),
            outcome(False, given_up=True),
            outcome(True, 4, 6),
            outcome(False, 0, 2, given_up=True),  # An intervention, if a vain one.
            outcome(True, 9, 9, lost=True),
        ],
    )
    assert row["beyond_help"] == 1
    assert (row["episodes"], row["lost"], row["interventions"], row["solved_alone"], row["solved"]) == (4, 1, 2, 1, 2)
    assert (row["recoveries"], row["recovery_frames"], row["correction_frames"]) == (1, 4, 8)
    assert row["corrections_per_recovery_frame"] == 2.0 and row["interventions_per_episode"] == 0.5
    low, high = row["interventions_interval"]
    assert low == pytest.approx(0.150, abs=1e-3) and high == pytest.approx(0.850, abs=1e-3)  # Wilson, 2 of 4
    assert "| 2 | 0.500 [0.150, 0.850], n = 4 | 1 | 1 | 1 | 1 : 2.00 | - | - | - |" in markdown(
        {"rounds": [row], "comparisons": []}
    )


@pytest.mark.parametrize("control", ["new_states", "same_states"])
def test_a_control_has_as_many_demonstrations_as_interventions_were_counted(control: RacControl) -> None:
    """An episode that broke is counted in neither."""
    outcomes = [outcome(True, 4, 6, index=3), outcome(True, 9, 9, index=4, lost=True), outcome(True, index=5)]
    rounds = SimpleNamespace(config=RacConfig())
    specs = _Rounds.control_states(rounds, control, outcomes, 1)  # type: ignore[arg-type]
    assert len(specs) == _summarize(1, outcomes)["interventions"] == 1
    assert control == "new_states" or specs == [EpisodeSpec("stack", "train", 3)]


def test_the_comparisons_p_is_by_state() -> None:
    row = {"a": "base", "b": "rac_1", "mode": "sampled", "num_pairs": 15, "num_states": 3, "rate_a": 0.0, "rate_b": 0.2}
    row |= {"difference": 0.2, "bootstrap": [0.0, 0.6], "p_value_by_state": 1.0}
    table = markdown({"rounds": [], "comparisons": [row]})
    assert "| p by state |" in table and table.rstrip().endswith("+20.0 [+0.0, +60.0] | 1.00 |")
    alone = markdown({"rounds": [], "comparisons": [row | {"num_states": 15, "p_value_by_state": 0.0625}]})
    assert "| McNemar p |" in alone and alone.rstrip().endswith("| 0.0625 |")


def test_no_recovery_has_no_ratio() -> None:
    assert _summarize(1, [outcome(True)])["corrections_per_recovery_frame"] is None


@pytest.mark.parametrize("env", [DummyConfig(horizon=16), MetaWorldConfig(tasks=("reach",), horizon=16)])
def test_the_person_has_steps_beyond_the_horizon_whichever_option_says_it(env: EnvConfig) -> None:
    horizons = env.env_spec().horizon
    assert longer(env, horizons, 8).env_spec().horizon == {task: steps + 8 for task, steps in horizons.items()}


def test_a_simulator_that_ends_episodes_before_the_person_is_done_is_refused() -> None:
    env = MetaWorldConfig(tasks=("reach",), horizon=480)
    with pytest.raises(ConfigError, match=r"after 500 control steps.*has 48 control steps beyond .* lower that"):
        longer(env, env.env_spec().horizon, 48)


def test_what_a_recipe_needs(tmp_path: Path) -> None:
    able = load_recipe("tabletop_rac", ["policy.path='pretrained:tabletop_clean'", f"sft.datasets={tmp_path / 'none'}"])
    with pytest.raises(DatasetError, match="none"):
        run_rac(able, tmp_path, print)
    assert not list(tmp_path.iterdir()), "said before anything is collected"


@pytest.mark.slow
def test_a_whole_run_and_going_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is solved by then: every episode gets an intervention.
    monkeypatch.setattr("vla_rl.workflows.rac.ALARM_FRACTION", 0.2)
    demos = tmp_path / "demos"
    recipe = load_recipe(
        "tabletop_rac",
        [
            "policy={kind: openvla, path: 'pretrained:tabletop_clean'}",
            "env.tasks=[stack]",
            "env.num_envs=4",
            "env.num_workers=0",
            "env.knock=0",
            f"collect={{source: expert, dataset: '{demos}', episodes_per_task: 2}}",
            f"sft.datasets={demos}",
            "sft.steps=2",
            "sft.batch_size=8",
            "rac.episodes_per_task=4",
            "rac.rounds=1",
            "rac.person.alarm=clock",
            "eval.episodes_per_task=2",
            "log.console=false",
        ],
    )
    folder = tmp_path / "run"
    result = run_rac(recipe, folder, print)
    (row,) = result["rounds"]
    assert row["interventions"] == row["episodes"] == 4
    controls = ("control_new_states", "control_same_states")
    assert all(row[f"{arm}_success"]["n"] == 2 for arm in ("rac", *controls))
    assert [(c["a"], c["b"]) for c in result["comparisons"]] == [
        ("base", "rac_1"),
        *(("base", f"{control}_1") for control in controls),
        *((f"{control}_1", "rac_1") for control in controls),
    ]
    needs = DataNeeds(cameras=("agentview",), action_dim=7)
    episodes, new, same = (
        open_dataset(DatasetConfig(path=str(folder / "round_1" / name)), needs)
        for name in ("episodes", "demonstrations_new_states", "demonstrations_same_states")
    )
    assert sorted(episodes.initial_states) == sorted(same.initial_states), "the same initial states, and as many others"
    assert len(new.initial_states) == 4 and not set(new.initial_states) & set(same.initial_states)
    assert {CONTROL_SOURCES[i] for i in episodes.source} == {"policy", "recovery", "correction"}
    assert {CONTROL_SOURCES[i] for one in (new, same) for i in one.source} == {"demo"}
    config = json.loads((folder / "round_1" / "rac" / "policy" / "config.json").read_text())
    assert config

    before = {p: p.stat().st_mtime_ns for p in (folder / "round_1").rglob("*") if p.is_file()}
    assert run_rac(recipe, folder, print) == result == json.loads((folder / RESULTS).read_text())
    assert before == {p: p.stat().st_mtime_ns for p in (folder / "round_1").rglob("*") if p.is_file()}
