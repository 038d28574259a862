"""Rollouts that are learned from once more: which episodes, of which groups and versions; through a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_problem as toy
from tiny_run import make_recipe, metrics, save_small_policy, small_recipe

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.stale import EarlierRollouts
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.training.config import TrainConfig
from vla_rl.training.train import train
from vla_rl.types import Episode

GROUPS, SIZE = 4, 4


def rollout(seed: int) -> list[Episode]:
    return toy.roll_out(toy.ToyPolicy(), GROUPS, SIZE, seed=seed)


def versions(episodes: list[Episode]) -> list[int]:
    found = [np.unique(e.chunks.version) for e in episodes]
    assert all(len(each) == 1 for each in found)
    return [int(each[0]) for each in found]


def test_the_newest_come_first_then_the_last_ones_with_groups_of_their_own():
    earlier, each = EarlierRollouts(2, GROUPS), GROUPS * SIZE
    assert versions(earlier.beside(rollout(0), 0)) == [0] * each
    earlier.beside(rollout(1), 1)
    earlier.beside(rollout(2), 2)
    together = earlier.beside(rollout(3), 3)
    assert versions(together) == [3] * each + [2] * each + [1] * each
    assert [e.group for e in together] == [
        g for age in range(3) for g in np.repeat(np.arange(GROUPS), SIZE) + GROUPS * age
    ]
    assert np.array_equal(together[each].obs.state, rollout(2)[0].obs.state)


def test_lost_episodes_and_frames_are_not_kept():
    earlier = EarlierRollouts(1, GROUPS)
    first = rollout(0)
    first[0] = replace(first[0], lost=True)
    first[1] = replace(first[1], frames={}, info={"x": np.zeros(first[1].num_chunks)})
    earlier.beside(first, 0)
    kept = earlier.beside(rollout(1), 1)[GROUPS * SIZE :]
    assert len(kept) == GROUPS * SIZE - 1
    assert kept[0].frames is None and kept[0].info == {}


def test_a_rollout_that_was_lost_as_a_whole_is_said_whatever_is_kept():
    earlier = EarlierRollouts(1, GROUPS)
    earlier.beside(rollout(0), 0)
    with pytest.raises(ValueError, match="no episode to learn from: all 16 of the rollout were lost"):
        earlier.beside([replace(episode, lost=True) for episode in rollout(1)], 1)


def test_a_checkpoint_gives_back_what_is_learned_from_to_the_bit():
    earlier, other = EarlierRollouts(2, GROUPS), EarlierRollouts(2, GROUPS)
    assert earlier.tensors() == {} and earlier.state() == []
    earlier.beside(rollout(0), 0)
    earlier.beside(rollout(1), 1)
    other.load(earlier.tensors(), earlier.state())
    learnt = []
    for each in (earlier, other):
        policy = toy.ToyPolicy(seed=1)
        learner = GRPOConfig(optim={"lr": 1e-2}, minibatch_size=16).build(policy)
        learner.iteration = 2
        learnt.append(learner.update(learner.prepare(each.beside(rollout(2), 2))))
    assert learnt[0] == learnt[1] and learnt[0]["stale/lag_max"] == 2


def test_it_must_be_one_process_and_an_algorithm_that_can(tmp_path):
    two = ProcessGroup(size=2)
    with pytest.raises(ValueError, match=r"train.reuse: got 1 with 2 processes"):
        EarlierRollouts.of(TrainConfig(reuse=1), two)
    with pytest.raises(ConfigError, match=r"train.reuse: got 1, but algo.kind 'dr_grpo'"):
        values = "{kind: world_model, path: x}"
        make_recipe(tmp_path, "train.reuse=1", "algo.kind=dr_grpo", f"algo.values={values}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("reuse") / "base")


def test_a_run_learns_from_earlier_rollouts_and_says_so(policy, tmp_path):
    recipe = small_recipe(policy, "train.reuse=2")
    train(recipe, open_run(recipe, tmp_path / "run", False))
    logged = metrics(tmp_path / "run")
    assert "stale/share" not in logged[0] and logged[1]["stale/lag_max"] == 1
    assert logged[-1]["stale/lag_max"] == min(2, recipe.train.iterations - 1)
    assert logged[1]["train/episodes"] == logged[0]["train/episodes"]  # Only the new ones are counted.
