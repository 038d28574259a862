"""Short branches: they end some frames after a real one, worth the value there, and pay a full success as ever.

In the toy world a frame of pushes by 1 moves by 1, and the value is sigmoid(2 (position - 6 + 4 left / 24 - 2) + 0.5).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import GOAL, METADATA, ToyInitialFrames, push, through_a_file, toy_valued, toy_world_model

from vla_rl.config import ConfigError
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.imagination.reward import branch_steps
from world_model.model.world_model import WorldModel

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125, and takes 24 steps; reach_back starts 4 further, 16 steps.


def value(position: float, left: int) -> float:
    return float(1 / (1 + np.exp(-(2 * (position - GOAL + 4 * left / 24 - 2) + 0.5))))


def branching(num_envs: int = 1, world_model: WorldModel | None = None, **options: Any) -> WorldModelEnv:
    config = ImaginationConfig.model_validate({"branch_frames": 2, **options})
    return WorldModelEnv(world_model or toy_valued(), ToyInitialFrames(), config, num_envs)


@pytest.mark.parametrize("reward", [{}, {"reward": "probability", "dual_noise": 0}])
def test_a_branch_ends_after_its_frames_worth_the_value_there(reward) -> None:
    env = branching(branch_frames=4, **reward)
    env.reset([SPEC])
    first, second = env.step(push(1, 1, 8)), env.step(push(0.5, 1, 8))
    assert not first.done[0] and second.truncated[0, 7] and not second.terminated.any() and not second.success[0]
    assert first.reward.sum() + second.reward.sum() == pytest.approx(value(1.125 + 3, 8), rel=1e-4)
    assert second.num_steps.tolist() == [8]


def test_a_branch_can_end_within_a_chunk_and_others_go_on_beside_it() -> None:
    env = branching(2, branch_frames=1)
    env.reset([SPEC, EpisodeSpec("reach_back", "train", 5)])  # At 1.125 and at 5.625.
    result = env.step(push(0.25, 2, 8))
    assert result.num_steps.tolist() == [4, 4] and result.done.all()
    np.testing.assert_allclose(result.reward[:, 3], [value(1.375, 20), value(5.875, 12)], rtol=1e-4)
    assert result.success.tolist() == [False, True], "a value above a half is told as a success"


def test_a_branch_is_worth_its_last_executed_frame_not_what_else_was_imagined() -> None:
    """With noise the toy moves also where nothing is done, so the chunk's later frames lie elsewhere."""
    env = branching(2, toy_valued(noise=0.5), branch_frames=2)
    env.reset([SPEC, SPEC])
    env.step(push(0.25, 1, 4), [1])  # So the second branch ends one frame earlier in the chunk.
    result = env.step(push(0.25, 2, 12))
    assert result.num_steps.tolist() == [8, 4] and result.done.all()
    paid, positions = result.reward[[0, 1], [7, 3]], result.obs.state[:, 0]
    np.testing.assert_allclose(paid, [value(position, 16) for position in positions], rtol=1e-4)


def test_a_full_success_on_the_way_pays_as_it_always_does() -> None:
    env = branching(branch_frames=2)
    env.reset([EpisodeSpec("reach_back", "train", 0)])
    result = env.step(push(1, 1, 8))  # 7 after a frame and a push.
    assert result.terminated.any() and result.reward.sum() == 1 and result.success[0]


def test_where_the_task_ends_there_is_nothing_to_hope_for() -> None:
    for frames in (4, 5):
        env = branching(branch_frames=frames)
        env.reset([EpisodeSpec("reach_back", "train", 0)])
        env.step(push(0, 1, 8))
        result = env.step(push(0, 1, 8))  # At 16 steps, its horizon.
        assert result.truncated[0, 7] and result.reward.sum() == 0 and not result.success[0]


def test_frames_are_counted_from_the_real_one_also_through_a_keyframe() -> None:
    env = branching(branch_frames=4)
    env.reset([SPEC])
    env.step(push(1, 1, 8))
    keyframe = through_a_file(env.save_state()[0])
    again = branching(branch_frames=4)
    again.reset([EpisodeSpec("reach", keyframe=keyframe)])
    result = again.step(push(1, 1, 16))
    assert result.num_steps.tolist() == [8] and result.truncated[0, 7]
    assert result.reward.sum() == pytest.approx(value(5.125, 8), rel=1e-4)


def test_auto_goes_as_deep_as_the_value_stays_good() -> None:
    def steps(*aucs: float | None) -> int | None:
        world_model = toy_valued()
        found = {"by_depth": [{"auc": auc} for auc in aucs]}
        world_model.metadata = world_model.metadata.model_copy(update={"value_calibration": found})
        return branch_steps(world_model, ImaginationConfig(branch_frames="auto"))

    assert steps(0.95, 0.9, 0.86, 0.84) == 8 and steps(0.95, 0.9, 0.8, 0.9) == 4
    for aucs in ((0.95, 0.84, 0.9), (0.95, None), ()):
        with pytest.raises(ConfigError, match=r"branch_frames: got 'auto', but .*below 0\.85"):
            steps(*aucs)
    assert branch_steps(toy_valued(), ImaginationConfig()) is None


def test_a_branch_beyond_the_horizon_is_refused() -> None:
    assert branch_steps(toy_valued(), ImaginationConfig(branch_frames=2, horizon=8)) == 8
    for horizon, most in ((7, "give 1 at most"), (3, "leave it null")):
        with pytest.raises(ConfigError, match=rf"branch_frames: got 2, 2 frames of 4 .* after {horizon} .*; {most}"):
            branching(branch_frames=2, horizon=horizon)
    deep = toy_valued()
    found = {"by_depth": [{"auc": 0.9}] * 4}
    deep.metadata = deep.metadata.model_copy(update={"value_calibration": found})
    depths = {
        horizon: branch_steps(deep, ImaginationConfig(branch_frames="auto", horizon=horizon)) for horizon in (9, 40)
    }
    assert depths == {9: 8, 40: 12}, "auto stays within it"
    with pytest.raises(ConfigError, match=r"branch_frames: got 'auto', 1 frames"):
        branching(world_model=deep, branch_frames="auto", horizon=3)


def test_a_branch_needs_a_value() -> None:
    with pytest.raises(ConfigError, match=r"has no value.*world_model\.value\.steps"):
        branching(world_model=toy_world_model(metadata=METADATA))
    told = METADATA.model_copy(update={"value_probability": (2.0, 0.5)})
    with pytest.raises(ConfigError, match=r"has no value"):
        branching(world_model=toy_world_model(metadata=told))  # Its network is missing.
