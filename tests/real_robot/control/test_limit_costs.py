"""Costs by the limiter's own rules on episodes made by hand, their normalization, the price, and a run cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import metrics, save_small_policy, small_recipe

from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.contract.safety import SafetyConfig
from real_robot.control.limit_costs import HELD, LimitsGRPOConfig, cost_advantages, held_steps
from sim.dummy import DummyConfig
from vla_rl.algorithms.batch import decisions, has_spread
from vla_rl.algorithms.grpo import group_relative
from vla_rl.common.distributed.process_group import ALONE
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.policies.load import load_policy
from vla_rl.rollout.runner import collect
from vla_rl.training.checkpoint import load_checkpoint
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

KIND = "real_robot.control.limit_costs:LimitsGRPOConfig"
SPEED = {"kind": "velocity", "low": -1.0, "high": 1.0}


def episode(actions: Any, states: Any, num_steps: Any) -> Episode:
    """One with actions (K, H, A), seen states (K, S) before each chunk and executed steps (K,)."""
    actions, states = np.array(actions, np.float32), np.array(states, np.float32)
    nothing, none = np.zeros(actions.shape[:2], np.float32), np.zeros(actions.shape[:2], bool)
    obs = Observation({}, states, ["go"] * len(states))
    steps = np.array(num_steps, np.int64)
    return Episode(EpisodeSpec("go"), obs, ActionChunk(actions), nothing, none, none, steps, False, obs.row(-1))


def safety(*dimensions: dict[str, Any], **options: Any) -> SafetyConfig:
    named = [{"name": f"n{i}", **d} for i, d in enumerate(dimensions)]
    return SafetyConfig.model_validate({"control_hz": 16.0, "dimensions": named, **options})


def held(limits: SafetyConfig, *along: float, states: Any = ((0.0,),)) -> list[bool]:
    """Of actions of one number, in one chunk."""
    return held_steps(limits, episode([[[x] for x in along]], states, [len(along)]))[0].tolist()


def test_acceleration_counts_until_the_limiter_has_caught_up():
    braked = safety({**SPEED, "max_acceleration": 8.0})  # 0.5 a tick
    # Sent: 0.5, 1, 1, then 0.5, 0, -0.5, -1 on the way to -1.
    assert held(braked, 0.5, 1, 1, -1, -1, -1, -1) == [False, False, False, True, True, True, False]
    assert held(safety(SPEED), 0.5, 1, 1, -1, -1, -1, -1) == [False] * 7
    assert held(safety(SPEED), 1 + 1e-6, 1.01) == [False, True]  # rounding, and a bound


def test_jerk_counts_where_acceleration_alone_would_not():
    # 0.25 a tick is within 8 a second; the jerk lets the acceleration rise by 2 a tick: to 2, 4, ... of the 4 asked.
    rising = (0.25, 0.5, 0.75)
    assert held(safety({**SPEED, "max_acceleration": 8.0}), *rising) == [False] * 3
    assert held(safety({**SPEED, "max_acceleration": 8.0, "max_jerk": 32.0}), *rising) == [True] * 3


def test_speed_of_a_position_counts_from_where_it_is_measured():
    joint = safety({"kind": "position", "low": -1, "high": 1, "max_velocity": 4.0, "state": 0})  # 0.25 a tick
    assert held(joint, 0.75, 1.0, 0.5, states=[[0.5]]) == [False, False, True]
    assert held(joint, 1.0, 1.0, states=[[2.0]]) == [True, True]  # Outside: it would not be moved at all.


def test_the_workspace_holds_near_its_side_and_the_way_back_is_open():
    box = {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-1, -1, -1], "high": [0.125, 1, 1]}
    limits = safety(SPEED, SPEED, SPEED, workspace=box)
    # 1/16 m a tick from x = 0: two fit, the third does not. Seen at the side it may go back, and along it, but not on
    # until it is seen elsewhere.
    chunks = [[[1, 0, 0]] * 3, [[-1, 0, 0], [0, 1, 0], [1, 1, 0]]]
    found = held_steps(limits, episode(chunks, [[0, 0, 0], [0.125, 0, 0]], [3, 3]))
    assert found.tolist() == [[False, False, True], [False, False, True]]
    # Under joint commands leaving the box is a stop: from the chunk on that saw it, all is held.
    joints = safety(SPEED, workspace={**box, "commands": None})
    outside = episode([[[0.0], [0.0]]] * 3, [[0, 0, 0], [0.2, 0, 0], [0, 0, 0]], [2, 2, 1])
    assert held_steps(joints, outside).tolist() == [[False, False], [True, True], [True, False]]  # One not executed.


def test_costs_are_normalized_by_their_own_group():
    # Group 7, first chunks: held (1, 0) and (1, 1) cost 1 0 and 2 1 to the chunk's end: mean 1.5 0.5, so -+0.5 each.
    # Second chunks: (0, 1) costs 1 1, of one action that counts, and (0, 0) 0 0: mean 0.5 of the first actions, -+0.5;
    # the only second action that counts is its own mean. Six of +-0.5 and a 0, squares 1.5 in all, over 7 - 1: the
    # deviation is 0.5. Group 9: held (1, 0) alone is its own mean.
    held = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]], bool)
    valid = np.array([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]], bool)
    found = cost_advantages(held, valid, np.array([7, 7, 7, 7, 9]), np.array([0, 1, 0, 1, 0]))
    np.testing.assert_allclose(found, [[-1, -1], [1, 0], [1, 1], [-1, 0], [0, 0]], atol=1e-5)


# --- with a policy, in the dummy environment ----------------------------------------------------


@pytest.fixture(scope="module")
def contract(tmp_path_factory) -> Path:
    """The tabletop's, with slow accelerations: a random walk is held now and then, but not always."""
    text = shipped_contracts()["sim_robot"].read_text()
    path = tmp_path_factory.mktemp("contract") / "gentle.yaml"
    path.write_text(text.replace("high: 1}", "high: 1, max_acceleration: 38}"))
    return path


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("limits") / "base")


def evaluate(episodes, episode, chunk, chunks):
    return np.zeros(chunks.actions.shape, np.float32), None


@pytest.fixture(scope="module")
def episodes(policy) -> list[Episode]:
    env = DummyConfig(num_envs=8, tasks=("reach_red",), horizon=16).build()
    specs = [EpisodeSpec("reach_red", "train", 18 + i // 8) for i in range(32)]
    return collect(load_policy(policy), env, specs, seed=1, groups=[i // 8 for i in range(32)])


def rewards_and_groups(episodes) -> tuple[np.ndarray, np.ndarray]:
    return np.array([e.total_reward for e in episodes]), np.array([e.group for e in episodes])


def test_a_batch_pays_chunks_for_what_they_did_and_the_control_for_what_others_did(contract, episodes):
    limits, (rewards, groups) = load_contract(contract).safety, rewards_and_groups(episodes)
    held = np.concatenate([held_steps(limits, e) for e in episodes])
    episode, chunk, _, valid = decisions(episodes)
    costs = cost_advantages(held, valid, groups[episode], chunk)
    success = group_relative(rewards, groups)[episode][:, None]

    def advantages(**options: Any) -> np.ndarray:
        config = LimitsGRPOConfig(contract=str(contract), target=1.0, **options)
        batch = config.make_batch(episodes, evaluate, None, ALONE)
        assert batch.metrics[HELD] == held.sum() / len(episodes) and batch.metrics["limits/price"] == options["price"]
        assert batch.metrics["limits/held_share"] == held.sum() / sum(e.length for e in episodes)
        return batch.advantage

    expected = ((success - 2 * costs) / 3 * valid).astype(np.float32)
    np.testing.assert_allclose(advantages(price=2.0), expected, atol=1e-6)
    paid = -advantages(price=1e9, shuffle_costs=True)[valid]  # Costs alone, in effect.
    assert abs(np.corrcoef(paid, costs[valid])[0, 1]) < 0.2 and 0.9 < paid.std() < 1.1


def test_without_a_price_only_groups_with_both_outcomes_take_part(contract, episodes):
    rewards, groups = rewards_and_groups(episodes)
    mixed = has_spread(rewards, groups)
    assert 0 < mixed.sum() < len(mixed)
    for price, expected in ((0.0, np.flatnonzero(mixed)), (0.1, np.arange(len(mixed)))):
        config = LimitsGRPOConfig(contract=str(contract), target=1.0, price=price)
        batch = config.make_batch(episodes, evaluate, None, ALONE)
        assert set(batch.episode) == set(expected)
        success = group_relative(rewards, groups)[batch.episode][:, None] * batch.valid
        assert np.allclose(batch.advantage, success, atol=1e-6) is (price == 0)


def test_a_contract_of_another_robot_is_refused(policy, contract, episodes):
    with pytest.raises(ConfigError, match=r"algo\.contract: so101 has 6 numbers in a command .* actions have 7"):
        LimitsGRPOConfig(contract="so101", target=1).build(load_policy(policy))
    with pytest.raises(ConfigError, match=r"algo\.contract: .* read 3 numbers of the state, .* has 2"):
        held_steps(load_contract(contract).safety, episode(np.zeros((1, 1, 7)), np.zeros((1, 2)), [1]))


class _Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def test_the_price_follows_the_logged_counts_and_a_run_cut_off_goes_on_with_it(policy, contract, tmp_path, monkeypatch):
    own = (f"algo.kind={KIND}", f"algo.contract={contract}", "algo.price=0.3", "algo.price_rate=0.25")
    recipe = small_recipe(policy, *own, "algo.target=4")
    whole = train(recipe, open_run(recipe, tmp_path / "whole", False)).parent
    rows = metrics(whole)
    price = 0.3
    for row in rows:
        assert row["limits/price"] == price
        price = max(0.0, price + 0.25 * (row[HELD] - 4))
    assert len({row["limits/price"] for row in rows}) == 4
    finish = TrainingRun.finish_iteration

    def finish_and_die(self, episodes, values):
        finish(self, episodes, values)
        if self.iteration == 3:  # Logged, but not yet saved.
            raise _Killed

    folder = open_run(recipe, tmp_path / "cut", False)
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(TrainingRun, "finish_iteration", finish_and_die)
        train(recipe, folder)
    train(recipe, folder, resume=True)
    assert metrics(folder) == rows
    ours, theirs = (load_checkpoint(f / "checkpoints" / "step_00000004") for f in (folder, whole))
    assert ours[1] == theirs[1] and all(torch.equal(ours[0][n], theirs[0][n]) for n in ours[0])
