"""What is taken off an imagined chunk's reward where its frames do not show its actions: by hand, off, refused.

In the toy world a frame of pushes by 1 moves the position by 1: the mean action between two frames is how far it moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toy import METADATA, ToyInitialFrames, push, through_a_file, toy_env, toy_world_model

from vla_rl.config import ConfigError
from vla_rl.types import EpisodeSpec, StepResult
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.imagination.reward import chunk_error
from world_model.types import Actions

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125.


class ToyInverse(nn.Module):
    """Reads the first dimension, without an error, off how far the position moved."""

    def errors(self, latents: torch.Tensor, actions: Actions) -> torch.Tensor:
        moved = latents.diff(dim=1)[:, :, 0, 0, 0, 0]
        wanted = actions.values[..., 0].sum(2) / actions.executed.sum(2)
        return (moved - wanted).square()


def penalized(share: float = 1.0, index: int = 1, **options: Any) -> WorldModelEnv:
    """One environment, whose frames move by `share` of what the actions ask for; charged from .01 on, all at .25."""
    world_model = toy_world_model(0.0, METADATA.model_copy(update={"inverse_errors": (0.01, 0.25)}))
    world_model.inverse = ToyInverse()  # type: ignore[assignment]
    world_model.dynamics.gain.data *= share  # type: ignore[union-attr, operator]
    values = {"reward": "probability", "dual_noise": 0, "action_penalty": 0.2} | options
    env = WorldModelEnv(world_model, ToyInitialFrames(), ImaginationConfig.model_validate(values), 1)
    env.reset([EpisodeSpec("reach", "train", index)])
    return env


def steps(env: WorldModelEnv, size: float = 1.0, count: int = 2) -> list[StepResult]:
    return [env.step(push(size, 1, 8)) for _ in range(count)]


def test_frames_that_follow_cost_nothing_and_others_up_to_the_penalty() -> None:
    for share, size, error in ((1.0, 1.0, 0.0), (0.5, 1.0, 1.0), (0.8, 1.0, 0.125), (0.0, 0.4, 0.625), (0.0, 1.0, 1.0)):
        found, free = (steps(penalized(share, action_penalty=p), size) for p in (0.2, 0.0))
        for one, other in zip(found, free, strict=True):
            assert one.info["action_error"] == pytest.approx([error], abs=1e-5)
            assert one.info.get("penalty", 0) == pytest.approx(0.2 * error, abs=1e-5)
            assert one.reward[0, 7] == pytest.approx(other.reward[0, 7] - 0.2 * error, abs=1e-6)
            assert not one.reward[0, :7].any()


def test_no_verdict_changes_and_nothing_follows_from_what_was_taken_off() -> None:
    for reward in ("probability", "success"):
        envs = (penalized(0.75, index=8, action_penalty=p, reward=reward) for p in (1.0, 0.0))
        found, free = (steps(env, count=3) for env in envs)  # From 2 to 6.5.
        assert free[2].success[0], "it gets there, but not as the actions say"
        for one, other in zip(found, free, strict=True):
            for name in ("terminated", "truncated", "num_steps", "success", "lost"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            np.testing.assert_array_equal(one.obs.state, other.obs.state)
            assert one.reward.sum() < other.reward.sum()


def test_off_nothing_is_read_and_all_is_as_without_the_part() -> None:
    plain = toy_env(1, reward="probability", dual_noise=0)
    plain.reset([SPEC])
    for one, other in zip(steps(penalized(action_penalty=0)), steps(plain), strict=True):
        np.testing.assert_array_equal(one.reward, other.reward)
        assert one.info.keys() == other.info.keys() and "action_error" not in one.info


def test_only_executed_frames_are_charged() -> None:
    error = np.array([[0.5, 0.1], [0.5, 0.1], [np.nan, np.nan]], np.float32)
    assert chunk_error(error, np.array([4, 5, 0]), 4).tolist() == pytest.approx([0.5, 0.3, 0.0])


def test_an_episode_that_is_lost_is_not_charged() -> None:
    env = penalized(0.5)
    env.world_model.dynamics.broken = 1.0  # type: ignore[assignment]
    result = env.step(push(1, 1, 8))
    assert result.lost[0] and not result.reward.any() and result.info["action_error"] == [0]


def test_a_keyframe_goes_on_to_the_same_charges() -> None:
    env = penalized(0.8)
    steps(env, count=1)
    (keyframe,) = env.save_state()
    following = steps(env, count=1)[0]
    other = penalized(0.8)
    other.reset([EpisodeSpec("reach", "train", 1, keyframe=through_a_file(keyframe))])
    again = steps(other, count=1)[0]
    np.testing.assert_array_equal(again.reward, following.reward)
    assert again.info["action_error"] == following.info["action_error"] > 0


def test_a_world_model_without_the_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"action_penalty: got above 0.*no inverse dynamics.*inverse\.steps=600"):
        toy_env(1, action_penalty=0.1)
