"""Nothing that a policy does after it has succeeded is learned from, whatever the environment's section says."""

from __future__ import annotations

from pathlib import Path

from tiny_run import metrics, save_small_policy, small_recipe

from vla_rl.common.run_folder import open_run
from vla_rl.training.train import train

ONE = ("train.iterations=1", "train.groups=2", "train.group_size=4")


def test_episodes_that_rl_learns_from_end_at_success(tmp_path: Path) -> None:
    """They went on, and the actions after success had their episode's advantage."""
    policy = save_small_policy(tmp_path / "base")
    logged = []
    for steps in (0, 3):
        recipe = small_recipe(policy, *ONE, f"env.steps_after_success={steps}")
        train(recipe, folder := open_run(recipe, tmp_path / str(steps), False))
        logged.append(metrics(folder))
    assert 0 < logged[0][0]["train/success"] < 1
    assert logged[0] == logged[1]
