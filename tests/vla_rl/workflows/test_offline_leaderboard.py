"""The offline leaderboard: one command runs methods and controls, goes on where it stopped, and makes one table."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from reach_policy import log_episodes
from tiny_run import make_recipe, save_policy

from sim.dummy import DummyConfig
from vla_rl.config import ConfigError
from vla_rl.evaluation.results import Evaluation

ROOT = Path(__file__).parents[3]
ENV = DummyConfig(num_envs=4, image_size=32, horizon=11)


@pytest.fixture
def leaderboard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import offline_leaderboard

    return offline_leaderboard


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe of `vla-rl offline` with 16 logged episodes, as a file."""
    folder = tmp_path_factory.mktemp("leaderboard")
    log_episodes(ENV, folder / "logged", 8)
    values = make_recipe(save_policy(folder / "policy")).model_dump(mode="json")
    values["env"]["horizon"] = 11
    values |= {
        "algo": None,
        "name": "tiny_offline",
        "sft": {"datasets": [str(folder / "logged")], "steps": 2, "batch_size": 4},
        "offline": {},
    }
    file = folder / "tiny_offline.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.slow
@pytest.mark.timeout(1200)  # Four programs, one after another.
def test_it_runs_what_is_missing_and_keeps_the_lines_of_earlier_commands(
    leaderboard: ModuleType, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "board"), "--recipe", str(recipe), "sft.steps=2"]
    leaderboard.main([*output, "--methods", "filtered", "--controls", "filtered"])
    first = json.loads((tmp_path / "board" / "leaderboard.json").read_text())
    assert [row["method"] for row in first["rows"]] == ["filtered", "filtered-shuffled_outcomes"]
    assert first["episodes"] == 16 and first["dataset"] in capsys.readouterr().out
    evaluation = tmp_path / "board" / "filtered-seed0" / "evaluations" / "final.json"
    made = evaluation.stat().st_mtime_ns
    leaderboard.main([*output, "--methods", "preferences", "--controls", ""])
    second = json.loads((tmp_path / "board" / "leaderboard.json").read_text())
    assert [row["method"] for row in second["rows"]] == ["preferences", "filtered", "filtered-shuffled_outcomes"]
    assert "sft.steps=2" in (tmp_path / "board" / "preferences-seed0" / "command.txt").read_text()
    assert evaluation.stat().st_mtime_ns == made
    assert (tmp_path / "board" / "leaderboard.md").read_text().count("\n| ") == 4


def test_the_episodes_of_a_table_stay_the_same(leaderboard: ModuleType, recipe: Path, tmp_path: Path) -> None:
    from vla_rl.recipe.recipe import load_recipe

    found = leaderboard.fingerprint(load_recipe(str(recipe), []))
    assert found == leaderboard.fingerprint(load_recipe(str(recipe), [])) and len(found) == 16
    twice = load_recipe(str(recipe), [f"sft.datasets=[{recipe.parent}/logged,{recipe.parent}/logged]"])
    assert leaderboard.fingerprint(twice) != found
    table = tmp_path / "leaderboard.json"
    leaderboard.check_same_episodes(found, table)
    table.write_text(json.dumps({"dataset": "another"}))
    with pytest.raises(ConfigError, match=r"about other logged episodes \(fingerprint another, now"):
        leaderboard.check_same_episodes(found, table)


def evaluation(outcomes: list[bool]) -> Evaluation:
    how = {"task": "reach_red", "split": "eval", "sample": 0, "mode": "greedy", "steps": 5}
    episodes = [how | {"index": number, "success": success} for number, success in enumerate(outcomes)]
    return Evaluation.model_validate({"meta": META, "episodes": episodes})


META = {
    "name": "a", "env": "dummy", "split": "eval", "seed": 0, "temperatures": {"greedy": 0.0},
    "horizon": {"reach_red": 9}, "cameras": ["agentview"], "image_size": [32, 32], "num_envs": 4, "protocol": "",
    "config": {}, "created": "", "wall_seconds": 1.0,
}  # fmt: skip


def test_a_line_says_gain_interval_episodes_and_seeds(leaderboard: ModuleType) -> None:
    base = evaluation([True] * 20 + [False] * 80)
    better = evaluation([True] * 60 + [False] * 40)
    one = leaderboard.row("filtered", [0], base, [better])["modes"]["greedy"]
    assert one["gain"] == pytest.approx(0.4) and one["success"] == pytest.approx(0.6) and one["episodes"] == 100
    assert one["interval"][0] == pytest.approx(0.3, abs=0.03) and one["interval"][1] == pytest.approx(0.5, abs=0.03)
    two = leaderboard.row("cloning", [0, 1], base, [base, base])
    assert two["modes"]["greedy"]["interval"] == [None, None]
    rows = [two, leaderboard.row("filtered", [0], base, [better])]
    document = {"recipe": "r", "episodes": 9, "dataset": "f", "base": {"greedy": 0.2}, "rows": rows}
    lines = leaderboard.markdown(document).splitlines()
    assert lines[0] == "r: 9 logged episodes, fingerprint f; greedy 20.0 % before."
    assert lines[4].startswith("| filtered | 0 | 100 | 60.0 % | +40.0 [+3") and "needs 3 seeds" in lines[5]


def test_another_seed_joins_the_line_that_an_earlier_command_left(leaderboard: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "leaderboard.json"
    assert leaderboard.earlier_seeds(table, "filtered") == []
    table.write_text(json.dumps({"rows": [{"method": "filtered", "seeds": [0, 2]}, {"method": "recap", "seeds": [1]}]}))
    assert leaderboard.earlier_seeds(table, "filtered") == [0, 2]
    assert leaderboard.earlier_seeds(table, "cloning") == []


def test_an_unknown_method_is_refused(leaderboard: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"got \['best'\]; methods are cloning, filtered"):
        leaderboard.run(Namespace(methods=["best"], controls=[], seeds=[0]))
