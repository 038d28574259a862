"""Reward of imagined episodes: verified success, or its calibrated probability.

Where episodes are short branches, one that has not succeeded by its end is worth the value there.
"""

from __future__ import annotations

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.rollout.success import PENALTY
from world_model.config import ImaginationConfig
from world_model.imagination.chunk import ImaginedChunk
from world_model.metadata import WorldModelMetadata
from world_model.model.memory import Memory
from world_model.model.parts import NO_VALUE
from world_model.model.world_model import WorldModel

BRANCH_AUC = 0.85  # A branch is as deep as the value's AUC stays at this.
LIKELY = 0.5  # An episode that ends with a probability above this is told as a success.


def worth(world_model: WorldModel, chunk: ImaginedChunk, config: ImaginationConfig) -> torch.Tensor:
    """What a chunk's frames are taken for, (B, F): bool, a success; or float32, the probability of one."""
    if config.reward == "success":
        return chunk.success
    judged = chunk.actions.executed.any(2)
    return probability(world_model, chunk, config) * judged


def probability(world_model: WorldModel, chunk: ImaginedChunk, config: ImaginationConfig) -> torch.Tensor:
    """The probability of success that RL is paid with rewards other than "success", float32 (B, F)."""
    if config.reward == "objects":
        assert chunk.objects_score is not None, "the chunk was imagined with this config"
        return world_model.objects_probability(chunk.objects_score)
    return world_model.probability(chunk.success_score, chunk.clip_score)


def check_reward(world_model: WorldModel, config: ImaginationConfig) -> None:
    """Check that the world model has what its reward asks for.

    Raises:
        ConfigError: it has not.
    """
    if config.reward == "success" and (reason := world_model.metadata.no_threshold):
        raise ConfigError(
            "env.imagination.reward: got 'success', but the world model has no threshold of success, so nothing bounds "
            f"its false successes; use probability or objects, or fit it on more failed episodes. It said: {reason}"
        )
    if config.reward == "probability":
        world_model.check_probability()
    if config.reward == "objects":
        world_model.check_objects()
    if config.action_penalty:
        world_model.check_inverse()


def branch_steps(world_model: WorldModel, config: ImaginationConfig) -> int | None:
    """Control steps since a real frame after which an episode ends, worth the value; None: none.

    Args:
        config: its horizon is the one that holds, measured or given.

    Raises:
        ConfigError: the world model has no value; or as `steps_of_branches`.
    """
    if config.branch_frames is not None:
        world_model.check_value()
    return steps_of_branches(world_model.metadata, world_model.frame_steps, config)


def steps_of_branches(metadata: WorldModelMetadata, frame_steps: int, config: ImaginationConfig) -> int | None:
    """Control steps since a real frame after which an episode ends, worth the value; None: none.

    Args:
        frame_steps: of the world model. config: its horizon is the one that holds, measured or given.

    Raises:
        ConfigError: the world model has no value, with "auto" none whose AUC is high enough on imagined frames, or the
            horizon ends episodes before branches do.
    """
    if config.branch_frames is None:
        return None
    if metadata.value_probability is None:
        raise ConfigError(NO_VALUE)
    frames = config.branch_frames
    if frames == "auto":
        frames = _deepest(metadata, None if config.horizon is None else config.horizon // frame_steps)
    check_depth(frames, frame_steps, config)
    return frames * frame_steps


def check_depth(frames: int, frame_steps: int, config: ImaginationConfig) -> None:
    """Check that episodes go on for as many frames since a real one.

    Raises:
        ConfigError: the horizon ends them before.
    """
    if config.horizon is None or frames <= (room := config.horizon // frame_steps):
        return
    most = f"give {room} at most" if room else "leave it null"
    raise ConfigError(
        f"env.imagination.branch_frames: got {config.branch_frames!r}, {frames} frames of {frame_steps} control "
        f"steps, but imagined episodes end after {config.horizon} (env.imagination.horizon, or where that is null "
        f"the trust horizon that was measured), and there a branch is not worth the value; {most}, or set "
        f"env.imagination.horizon={frames * frame_steps}"
    )


def _deepest(metadata: WorldModelMetadata, room: int | None) -> int:
    """Frames since a real one up to which the value's AUC is high enough; within the horizon's `room` where any is."""
    figures = metadata.value_calibration.get("by_depth", ())
    measured = [figure["auc"] or 0.0 for figure in figures]
    deep = [depth for depth, auc in enumerate(measured) if depth and min(measured[1 : depth + 1]) >= BRANCH_AUC]
    if not deep:
        raise ConfigError(
            f"env.imagination.branch_frames: got 'auto', but one frame after a real one the value's AUC is below "
            f"{BRANCH_AUC:g} (by frames since a real one: {', '.join(f'{auc:.3f}' for auc in measured) or 'unknown'}); "
            "give a number, or fit the value on more episodes"
        )
    return max([depth for depth in deep if room is None or depth <= room] or deep[:1])


def leaf_values(
    world_model: WorldModel,
    memory: Memory,
    chunk: ImaginedChunk,
    rows: np.ndarray,
    last: np.ndarray,
    steps_left: np.ndarray,
) -> np.ndarray:
    """The value at the last executed frame of a chunk, float32 (n,), for the n episodes at `rows`.

    Args:
        memory: before the chunk. last: int64 (n,), which of the chunk's frames that is. steps_left: int64 (n,), control
            steps from it to the task's horizon.
    """
    chosen = rows.tolist()
    frames = chunk.frames.select(chosen)
    left = np.repeat(steps_left[:, None], frames.states.shape[1], 1)
    values = world_model.value(memory.select(chosen), frames, left).cpu().numpy()
    return values[np.arange(len(rows)), last]


def judge(worth: np.ndarray, config: ImaginationConfig, paid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Judge a chunk's frames by what `worth` says of them, (B, F).

    With `ImaginationConfig.reward` "probability" or "objects" an episode is worth the highest probability of its frames
    so far, and it ends where that passes `stop_probability`: what comes after a success can only blur what is seen of
    it.

    Args:
        paid: float32 (B,), what each episode has been paid before the chunk.

    Returns:
        value: float32 (B, F), what the episode is worth by that frame, in 0 .. 1. ends: bool (B, F), it has succeeded
        by that frame.
    """
    if config.reward == "success":
        return worth.astype(np.float32), worth
    value = np.maximum.accumulate(np.maximum(worth, paid[:, None]), axis=1)
    return value, value > config.stop_probability


def penalties(
    action_error: np.ndarray | None, num_steps: np.ndarray, frame_steps: int, config: ImaginationConfig
) -> dict[str, np.ndarray]:
    """What the rewards of B chunks are lowered by, for `StepResult.info`: nothing is told where none can be.

    Args:
        action_error: float32 (B, F), see `WorldModel.action_errors`; None without `ImaginationConfig.action_penalty`.
        num_steps: int64 (B,), executed; 0 where the episode is lost, whose chunk costs nothing.

    Returns:
        With an action penalty "action_error", see `chunk_error`, and `PENALTY`, float32 (B,).
    """
    if action_error is None:
        return {}
    error = chunk_error(action_error, num_steps, frame_steps)
    return {"action_error": error, PENALTY: np.float32(config.action_penalty) * error}


def chunk_error(error: np.ndarray, num_steps: np.ndarray, frame_steps: int) -> np.ndarray:
    """How far the frames of a chunk are from showing their actions: the mean over its executed frames, float32 (B,).

    EVA (arXiv 2603.17808) and RLIR (arXiv 2509.23958) reward a video model by an inverse dynamics; here the policy pays
    where it leads imagination to where that does not follow.

    Args:
        error: float32 (B, F), see `WorldModel.action_errors`. num_steps: int64 (B,), executed; 0: the error is 0.
    """
    executed = np.arange(error.shape[1]) * frame_steps < num_steps[:, None]
    total = np.where(executed, error, 0).sum(1)
    return (total / np.maximum(executed.sum(1), 1)).astype(np.float32)
