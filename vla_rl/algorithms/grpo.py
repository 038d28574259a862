"""GRPO and RLOO: an episode's advantage is its reward less its group's mean, or the others' mean. Numpy only."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from vla_rl.algorithms.base import GroupConfig
from vla_rl.algorithms.batch import mixed_groups


class GRPOConfig(GroupConfig):
    """Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(default=True, description="Divide by the group's standard deviation (false: Dr. GRPO).")

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return group_relative(rewards, groups, self.normalize_std), np.ones(len(rewards), bool)


def group_relative(
    rewards: np.ndarray, groups: np.ndarray, normalize_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """GRPO: A = (R - mean) / (std + eps) within each group, float64 (E,) (DeepSeekMath, arXiv 2402.03300, 4.1.2).

    The deviation is the sample one (n - 1), as SimpleVLA-RL and veRL take it. A group of one gets 0.

    Args:
        rewards: float (E,). groups: int (E,).
        normalize_std: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
    """
    rewards = np.asarray(rewards, np.float64)
    advantage = np.zeros_like(rewards)
    for rows in mixed_groups(rewards, groups):
        values = rewards[rows]
        scale = values.std(ddof=1) + eps if normalize_std else 1.0
        advantage[rows] = (values - values.mean()) / scale
    return advantage


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
    for rows in mixed_groups(rewards, groups):
        values = rewards[rows]
        advantage[rows] = values - (values.sum() - values) / (len(values) - 1)
    return advantage
