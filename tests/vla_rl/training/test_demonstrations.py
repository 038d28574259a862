"""Demonstrations inside an RL run: the behavior-cloning anchor, and the control that clones instead of RL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import make_recipe, metrics, save_policy, save_small_policy, small_recipe

from sim.dummy import DummyConfig
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.training.bc_trainer import BCTrainer, ContinueBC, Demonstrations
from vla_rl.training.checkpoint import load_checkpoint
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

TWO = ("train.iterations=2",)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("demonstrations") / "base")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("demonstrations") / "small")


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> str:
    """The sft section: demonstrations of the dummy environment's expert."""
    path = tmp_path_factory.mktemp("demonstrations") / "demos"
    config = CollectConfig(dataset=str(path), episodes_per_task=4)
    collect_dataset(DummyConfig(num_envs=4, tasks=("reach_red",)), config)
    return f"sft={{datasets: {path}, batch_size: 4, optim: {{lr: 1e-3}}}}"


def run_in(folder: Path, recipe, resume: bool = False) -> Path:
    train(recipe, open_run(recipe, folder, resume), resume)
    return folder


def test_batches_follow_from_the_seed_and_go_on_where_they_stopped(policy, sft):
    recipe = make_recipe(policy, sft)
    env_spec = recipe.env.env_spec()  # type: ignore[attr-defined]
    built = recipe.policy.build(env_spec)  # type: ignore[attr-defined]
    first, again, other = (Demonstrations(built, recipe.sft, env_spec, seed) for seed in (0, 0, 1))
    drawn = [first.batch() for _ in range(3)]
    again.num_drawn = 2
    assert (again.batch().actions == drawn[2].actions).all() and again.num_drawn == 3
    assert (other.batch().actions != drawn[0].actions).any()
    assert drawn[0].actions.shape == (4, 4, 7)
    loss, values = first.loss()
    assert loss.requires_grad and values["bc_loss"] > 0 and first.num_drawn == 4


def test_the_anchor_is_the_loss_that_behavior_cloning_learns_from(policy, sft):
    recipe = make_recipe(policy, sft, "policy.keyframe_loss_weight=0.5")
    env_spec = recipe.env.env_spec()  # type: ignore[attr-defined]
    built = recipe.policy.build(env_spec)  # type: ignore[attr-defined]
    anchor, cloning = Demonstrations(built, recipe.sft, env_spec, 0), BCTrainer(built, recipe.sft, 0)
    batch = anchor.batch()
    anchor.num_drawn = 0
    loss, values = anchor.loss()
    expected = cloning.evaluate(batch)
    assert values["keyframe_loss"] == expected["keyframe_loss"] > 0 and loss.item() == expected["loss"]


def test_continue_bc_makes_as_many_steps_as_rl_and_learns_from_demonstrations_only(small, sft, tmp_path):
    more_steps = ("algo.minibatch_size=4", "algo.epochs=2", *TWO)
    rl = metrics(run_in(tmp_path / "rl", small_recipe(small, *more_steps)))
    folder = run_in(tmp_path / "bc", small_recipe(small, sft, "train.control=continue_bc", *more_steps))
    rows = metrics(folder)
    assert rows[0]["train/success"] == rl[0]["train/success"], "both start from the same rollout"
    assert rows[0]["update/num_steps"] == rl[0]["update/num_steps"] > 2
    assert "loss/policy" in rl[0] and not any(name.startswith("loss/") for name in rows[0])
    assert rows[1]["bc/loss"] < rows[0]["bc/loss"] and rows[1]["bc/lr"] == rows[0]["bc/lr"] == 1e-3
    total = sum(row["update/num_steps"] for row in rows)
    _, state = load_checkpoint(folder / "checkpoints" / "step_00000002")
    assert state["demonstrations_drawn"] == total == state["learner"]["trainer"]["counters"]["num_steps"]


@pytest.mark.parametrize("options", [("train.control=continue_bc",), ("algo.bc_coef=0.5",)], ids=["control", "anchor"])
def test_resumed_runs_equal_uninterrupted_ones(small, sft, tmp_path, monkeypatch, options):
    recipe = small_recipe(small, sft, *options, *TWO, "train.keep_checkpoints=1")
    whole = run_in(tmp_path / "whole", recipe)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        save = TrainingRun.save
        patch.setattr(TrainingRun, "save", lambda self: save(self) or 1 / 0)  # type: ignore[func-returns-value]
        run_in(tmp_path / "cut", recipe)
    cut = run_in(tmp_path / "cut", recipe, resume=True)
    assert metrics(cut) == metrics(whole)
    ours, theirs = (load_checkpoint(f / "checkpoints" / "step_00000002")[0] for f in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ("loss/bc" in metrics(whole)[0]) == ("algo.bc_coef=0.5" in options)


def test_without_demonstrations_there_is_none_and_where_needed_it_says_so(policy, sft, tmp_path):
    with TrainingRun(make_recipe(policy, sft), tmp_path / "plain", resume=False) as run:
        assert run.demonstrations is None
        assert not isinstance(run.learner, ContinueBC)
    for option in ("train.control=continue_bc", "algo.bc_coef=0.1"):
        with pytest.raises(ConfigError, match=r"sft: this recipe has none, .*name them in sft\.datasets"):
            TrainingRun(make_recipe(policy, option), tmp_path / "none", resume=False)
