"""RLOO: an episode's baseline is the mean reward of the others in its group. Numpy only."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vla_rl.algorithms.base import GroupConfig
from vla_rl.algorithms.batch import all_same, rows_by_group


class RLOOConfig(GroupConfig):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024), as RIPT-VLA uses it with PPO's clipping."""

    kind: Literal["rloo"] = "rloo"

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return leave_one_out(rewards, groups), np.ones(len(rewards), bool)


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """RLOO: A_k = R_k - mean of R_j over j != k in the group (Kool et al. 2019; RIPT-VLA, arXiv 2505.17016).

    A group of one has no baseline and gets 0.

    Args:
        rewards: float (E,). groups: int (E,).

    Returns:
        float64 (E,).
    """
    rewards = np.asarray(rewards, np.float64)
    advantage = np.zeros_like(rewards)
    for rows in rows_by_group(groups):
        values = rewards[rows]
        if not all_same(values):
            advantage[rows] = values - (values.sum() - values) / (len(values) - 1)
    return advantage
