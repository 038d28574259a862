"""Imagined episodes that are paid their probability of success: by hand, in sum, where they end, through a keyframe.

In the toy world P(success) = sigmoid(2 * (position - 6)): .119 at 5, .5 at 6, .731 at 6.5, .881 at 7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from toy import GOAL, METADATA, ToyInitialFrames, push, through_a_file, toy_env, toy_world_model

from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import collect
from vla_rl.rollout.success import PENALTY, success_metrics
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.imagination.reward import penalties

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125; a frame of pushes by 1 moves by 1.


class Pusher(torch.nn.Module, Policy):
    """Pushes ahead, always by as much."""

    chunk_size, action_dim, cameras, uses_state = 8, 3, ("wrist",), True

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(push(self.size, obs.batch_size, 8))


def probability(position: float) -> float:
    return float(1 / (1 + np.exp(-2 * (position - GOAL))))


def probable_env(num_envs: int = 1, stop: float = 0.8) -> WorldModelEnv:
    return toy_env(num_envs, reward="probability", stop_probability=stop, dual_noise=0)


def test_an_episode_is_paid_its_probability_as_it_grows_and_ends_where_it_is_high() -> None:
    env = probable_env()
    env.reset([SPEC])
    position, paid = 1.125, 0.0
    for _ in range(2):
        result = env.step(push(1, 1, 8))
        position += 2
        assert result.reward[0, 7] == pytest.approx(probability(position) - paid, rel=1e-4) and not result.done[0]
        assert not result.reward[0, :7].any() and not result.success[0]
        paid = probability(position)
    result = env.step(push(1, 1, 8))  # To 6.125 in the first frame (.56), to 7.125 in the second (.90).
    assert result.num_steps.tolist() == [8] and result.terminated[0, 7] and result.success[0]
    assert result.reward[0, 7] == pytest.approx(probability(7.125) - paid, rel=1e-4)


def test_the_end_comes_with_the_frame_that_passes_the_limit_and_what_follows_is_not_paid() -> None:
    env = probable_env(stop=0.55)
    env.reset([SPEC])
    for _ in range(2):
        env.step(push(1, 1, 8))
    result = env.step(push(1, 1, 8))
    assert result.num_steps.tolist() == [4] and np.flatnonzero(result.terminated[0]).tolist() == [3]
    assert result.reward[0].sum() == pytest.approx(probability(6.125) - probability(5.125), rel=1e-4)


def test_what_was_reached_stays_paid_and_a_likely_end_is_told_as_a_success() -> None:
    env = probable_env()
    env.reset(
        [
            SPEC,
        ]
    )
    total = 0.0
    for size in (1, 1, 0.5):
        result = env.step(push(size, 1, 8))  # In the end at 6.125.
        total += float(result.reward.sum())
    assert result.truncated[0, 7] and not result.terminated.any() and result.success[0]
    assert total == pytest.approx(probability(6.125), rel=1e-4)

    env.reset([SPEC])
    total = 0.0
    for size in (1, 0.9, -1):
        result = env.step(push(size, 1, 8))
        assert (result.reward >= 0).all()
        total += float(result.reward.sum())
    assert result.truncated[0, 7] and not result.success[0]
    assert total == pytest.approx(probability(4.925), rel=1e-4)


def test_a_keyframe_remembers_what_was_paid() -> None:
    env = probable_env()
    env.reset([SPEC])
    env.step(push(1, 1, 8))
    env.step(push(1, 1, 8))
    (keyframe,) = env.save_state()
    expected = env.step(push(0.4, 1, 8))
    env.reset([EpisodeSpec("reach", "train", 1, keyframe=through_a_file(keyframe))])
    again = env.step(push(0.4, 1, 8))
    assert (again.reward == expected.reward).all() and again.reward.sum() > 0
    env.reset([SPEC])  # Another episode begins with nothing paid.
    env.step(push(1, 1, 8))
    assert env.step(push(1, 1, 8)).reward.sum() == pytest.approx(probability(5.125) - probability(3.125), rel=1e-4)


def test_beside_a_verdict_the_probability_of_success_is_told_up_to_where_the_episode_ends() -> None:
    env = toy_env(1, dual_noise=0)
    env.reset([SPEC])
    for position in (3.125, 5.125):
        assert env.step(push(1, 1, 8)).info["probability"] == pytest.approx(probability(position), rel=1e-4)
    result = env.step(push(1, 1, 8))  # Past the goal in the first frame, at 6.125; the second is not executed.
    assert result.success[0] and result.num_steps.tolist() == [4]
    assert result.info["probability"] == pytest.approx(probability(6.125), rel=1e-4)
    paid = probable_env()
    paid.reset([SPEC])
    assert "probability" not in paid.step(push(1, 1, 8)).info, "which is what was paid"
    unknown = METADATA.model_copy(update={"success_probability": None})
    env = WorldModelEnv(toy_world_model(metadata=unknown), ToyInitialFrames(), ImaginationConfig(dual_noise=0), 1)
    env.reset([SPEC])
    assert "probability" not in env.step(push(1, 1, 8)).info


def test_an_iteration_tells_the_probability_beside_the_success_that_it_paid() -> None:
    episodes = []
    for size in (1.0, 0.5):
        env = toy_env(1, dual_noise=0)
        episodes += collect(cast(Any, Pusher(size)), env, [SPEC], temperature=0)
    found = success_metrics(episodes, ["reach"], is_imagined=True)
    assert found["train/imagined"] == 0.5
    likely = [probability(6.125), probability(1.125 + 0.5 * 6)]
    assert found["train/imagined_probability"] == pytest.approx(np.mean(likely), rel=1e-4)
    known = [replace(episodes[0], info={}), episodes[1]]
    assert "train/imagined_probability" not in success_metrics(known, ["reach"], is_imagined=True)


def test_the_action_penalty_is_of_the_mean_error_of_the_executed_frames() -> None:
    error = np.array([[0.2, 0.6], [0.4, 0.8], [0.3, 0.3]], np.float32)
    found = penalties(error, np.array([8, 3, 0]), 4, ImaginationConfig(action_penalty=0.5))  # Both, the first, none.
    np.testing.assert_allclose(found["action_error"], [0.4, 0.4, 0.0])
    np.testing.assert_allclose(found[PENALTY], [0.2, 0.2, 0.0])
    assert penalties(None, np.array([8]), 4, ImaginationConfig()) == {}


def test_a_world_model_without_a_probability_is_refused() -> None:
    metadata = METADATA.model_copy(update={"success_probability": None})
    config = ImaginationConfig(reward="probability", dual_noise=0)
    with pytest.raises(ConfigError, match=r"env.imagination.reward: got 'probability'.*world-model fit"):
        WorldModelEnv(toy_world_model(metadata=metadata), ToyInitialFrames(), config, 1)


def test_dual_noise_needs_thresholds() -> None:
    with pytest.raises(ValueError, match=r"imagination.dual_noise: got 1 with reward 'probability'"):
        ImaginationConfig(reward="probability", dual_noise=1)
