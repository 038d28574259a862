"""What an imagined episode is worth by each frame: 1 once it counts as a success, or its probability of success."""

from __future__ import annotations

import numpy as np
import torch

from world_model.config import ImaginationConfig
from world_model.env.imagination import ImaginedChunk
from world_model.model.world_model import WorldModel

LIKELY = 0.5  # An episode that ends with a probability above this is told as a success.


def worth(world_model: WorldModel, chunk: ImaginedChunk, config: ImaginationConfig) -> torch.Tensor:
    """What a chunk's frames are taken for, (B, F): bool, a success; or float32, the probability of one."""
    if config.reward == "success":
        return chunk.success
    judged = chunk.actions.executed.any(2) & ~chunk.untrusted[:, None]
    return world_model.probability(chunk.success_score, chunk.clip_score) * judged


def judge(worth: np.ndarray, config: ImaginationConfig, paid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Judge a chunk's frames by what `worth` says of them, (B, F).

    With `ImaginationConfig.reward` "probability" an episode is worth the highest probability of its frames so far, and
    it ends where that passes `stop_probability`: what comes after a success can only blur what is seen of it.

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
