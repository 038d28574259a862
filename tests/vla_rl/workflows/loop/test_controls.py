"""What the outer loop is set against: controls that fail, end with RL, or take too much of the simulator."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_run
import yaml
from test_loop import Stopped, recipe, stop, two  # noqa: F401  (fixtures)
from tiny_run import save_policy

from vla_rl.cli.options import PROGRAM
from vla_rl.config import apply_overrides, dump_yaml
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.workflows.loop import controls as loop_controls
from vla_rl.workflows.loop.rounds import Round


def with_control(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recipe, list[Recipe]]:
    """A recipe with a control whose process fails at once, and the recipes that were started."""
    recipe = tiny_run.make_recipe(
        save_policy(folder / "policy"),
        *("train.keep=best", "train.validate_every=1", "train.validation_episodes=2", "sft.datasets=none"),
    )
    started: list[Recipe] = []

    def start(_: Recipe, file: Path, __: Path, overrides: Sequence[str], *_____: object) -> subprocess.Popen[bytes]:
        started.append(load_recipe(file, overrides))
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        process.wait()
        return process

    monkeypatch.setattr(loop_controls, "_start", start)
    return recipe, started


def test_a_control_that_fails_ends_rl_at_once(tmp_path, monkeypatch):
    recipe, started = with_control(tmp_path, monkeypatch)
    done = Round(tmp_path / "round_1")
    done.folder.mkdir()
    with pytest.raises(RuntimeError, match=r"the control continue_bc failed; its output .*train_continue_bc\.log"):
        loop_controls.run_beside_controls(recipe, ["continue_bc"], done, None, PROGRAM, lambda _: None)
    assert {row["step"] for row in tiny_run.metrics(done.run)} == {1}, "not only after RL's four iterations"
    assert started[0].train.keep == "last" and started[0].train.control == "continue_bc"


def test_where_rl_is_stopped_its_controls_end(tmp_path, monkeypatch):
    recipe, done = tiny_run.make_recipe(tmp_path / "policy", "sft.datasets=none"), Round(tmp_path / "round_1")
    done.folder.mkdir()
    control = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(loop_controls, "_start", lambda *_: control)
    monkeypatch.setattr(loop_controls, "train", stop)
    with pytest.raises(Stopped):
        loop_controls.run_beside_controls(recipe, ["continue_bc"], done, None, PROGRAM, lambda _: None)
    assert control.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("num_episodes", "expected"),
    [
        (160, (40, 1)),  # 40 groups of 4.
        (400, (50, 2)),  # 2.5 iterations of 40: two, larger ones.
        (7, (1, 1)),
    ],
)
def test_the_control_in_the_simulator_takes_no_more_than_the_loop_did(two, num_episodes, expected):
    options = ["train.groups=40", "algo.decay_iterations=50"]
    recipe = read_recipe(apply_overrides(two.model_dump(mode="json"), options))
    online = loop_controls.online_recipe(recipe, num_episodes)
    assert (online.train.groups, online.train.iterations) == expected and online.algo.decay_iterations == expected[1]
    assert online.train.groups * online.train.iterations * 4 <= num_episodes
    assert online.env.kind == "sim.dummy:DummyConfig" and not online.gate.every and not online.sampling.keyframe_share  # type: ignore[attr-defined]
    again = read_recipe(yaml.safe_load(dump_yaml(online)))
    assert again.train == online.train and again.real_env is None
