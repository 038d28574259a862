"""MC-GRPO: the group's median as baseline, its episode left out. Numpy only."""

from __future__ import annotations

from typing import Literal

import numpy as np

from vla_rl.algorithms.base import GroupConfig
from vla_rl.algorithms.batch import rows_by_group


class MCGRPOConfig(GroupConfig):
    """Median-Centered GRPO (Kim 2026, arXiv 2601.22582): G + 1 episodes, the median is baseline and left out."""

    kind: Literal["mc_grpo"] = "mc_grpo"

    def rollouts_per_group(self, group_size: int) -> int:
        """G + 1: one more, for the pivot."""
        return group_size + 1

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return median_baseline(rewards, groups)


def median_baseline(rewards: np.ndarray, groups: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    """MC-GRPO: A = (R - median) / (MAD + eps); one episode at the median, the pivot, is left out (arXiv 2601.22582).

    MAD is the median absolute deviation from the median. With success rewards (0 or 1) it is 0 in
    every group of odd size, since the majority sits on the median; dividing by a bare eps would then
    blow every advantage up to 1/eps. So where MAD is 0, the sample standard deviation is used. With
    an even number (an episode was lost) the median is the lower of the middle two.

    Args:
        rewards: float (E,). groups: int (E,).

    Returns:
        advantage float64 (E,), and bool (E,), False for each group's pivot.
    """
    rewards = np.asarray(rewards, np.float64)
    advantage = np.zeros_like(rewards)
    included = np.ones(len(rewards), bool)
    for rows in rows_by_group(groups):
        values = rewards[rows]
        middle = int(np.argsort(values, kind="stable")[(len(values) - 1) // 2])
        included[rows[middle]] = False
        if (values == values[0]).all():
            continue
        centered = values - values[middle]
        deviation = float(np.median(np.abs(centered)))
        advantage[rows] = centered / ((deviation if deviation > 0 else float(values.std(ddof=1))) + eps)
    return advantage, included


METHOD = MCGRPOConfig
