"""Imagined episodes that are paid their probability of success: by hand, in sum, where they end, through a keyframe.

In the toy world P(success) = sigmoid(2 * (position - 6)): .119 at 5, .5 at 6, .731 at 6.5, .881 at 7.
"""

from __future__ import annotations

import numpy as np
import pytest
from toy import GOAL, METADATA, ToyInitialFrames, push, through_a_file, toy_env, toy_world_model

from vla_rl.config import ConfigError
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125; a frame of pushes by 1 moves by 1.


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


def test_a_world_model_without_a_probability_is_refused() -> None:
    metadata = METADATA.model_copy(update={"success_probability": None})
    config = ImaginationConfig(reward="probability", dual_noise=0)
    with pytest.raises(ConfigError, match=r"env.imagination.reward: got 'probability'.*world-model fit"):
        WorldModelEnv(toy_world_model(metadata=metadata), ToyInitialFrames(), config, 1)


def test_dual_noise_needs_thresholds() -> None:
    with pytest.raises(ValueError, match=r"imagination.dual_noise: got 1 with reward 'probability'"):
        ImaginationConfig(reward="probability", dual_noise=1)
