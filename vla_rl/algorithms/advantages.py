"""Advantages: group-relative, leave-one-out, median baseline, GAE, and the shuffled control. Numpy only.

Shape legend: E episodes, K chunks of one episode, H actions in a chunk, T steps.
"""

from __future__ import annotations

import numpy as np


def group_relative(
    rewards: np.ndarray, groups: np.ndarray, normalize_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """GRPO: A = (R - mean) / (std + eps) within each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The deviation is the sample one (n - 1), as SimpleVLA-RL and veRL take it. A group of one gets 0.

    Args:
        rewards: float (E,). groups: int (E,).
        normalize_std: False leaves out the division (Dr. GRPO, arXiv 2503.20783).

    Returns:
        float64 (E,).
    """
    rewards = np.asarray(rewards, np.float64)
    advantage = np.zeros_like(rewards)
    for rows in _rows_by_group(groups):
        values = rewards[rows]
        if _all_same(values):
            continue
        scale = values.std(ddof=1) + eps if normalize_std else 1.0
        advantage[rows] = (values - values.mean()) / scale
    return advantage


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
    for rows in _rows_by_group(groups):
        values = rewards[rows]
        if not _all_same(values):
            advantage[rows] = values - (values.sum() - values) / (len(values) - 1)
    return advantage


def median_baseline(
    rewards: np.ndarray, groups: np.ndarray, normalize_mad: bool = True, eps: float = 1e-6
) -> tuple[np.ndarray, np.ndarray]:
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
    for rows in _rows_by_group(groups):
        values = rewards[rows]
        middle = int(np.argsort(values, kind="stable")[(len(values) - 1) // 2])
        included[rows[middle]] = False
        if _all_same(values):
            continue
        centered = values - values[middle]
        scale = 1.0
        if normalize_mad:
            deviation = float(np.median(np.abs(centered)))
            scale = (deviation if deviation > 0 else float(values.std(ddof=1))) + eps
        advantage[rows] = centered / scale
    return advantage, included


def gae(
    reward: np.ndarray, value: np.ndarray, bootstrap: float, *, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation over one episode (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1}

    Args:
        reward: float (T,). value: float (T,), the critic's estimate before each step.
        bootstrap: V after the last step: 0 when the episode terminated, V(final observation) when it was truncated.

    Returns:
        advantage float64 (T,), and return (the critic's target) A + V, float64 (T,).
    """
    reward, value = np.asarray(reward, np.float64), np.asarray(value, np.float64)
    next_value = np.append(value[1:], bootstrap)
    delta = reward + gamma * next_value - value
    advantage = np.zeros_like(delta)
    running = 0.0
    for t in reversed(range(len(delta))):
        running = delta[t] + gamma * gae_lambda * running
        advantage[t] = running
    return advantage, advantage + value


def chunk_gae(
    reward: np.ndarray, value: np.ndarray, bootstrap: float, *, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """GAE with one step per decision: a chunk's reward is the sum over its actions; discount per chunk.

    Args:
        reward: float (K, H), zero where not executed. value: float (K,). bootstrap: as in `gae`.

    Returns:
        advantage float64 (K, H), the same for all actions of a chunk, and return float64 (K,).
    """
    advantage, returns = gae(reward.sum(1), value, bootstrap, gamma=gamma, gae_lambda=gae_lambda)
    return np.repeat(advantage[:, None], reward.shape[1], axis=1), returns


def action_gae(
    reward: np.ndarray,
    num_steps: np.ndarray,
    value: np.ndarray,
    bootstrap: float,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """GAE with one step per executed action; discount and lambda per action.

    The critic sees the observation once per chunk, so its estimate is held for the chunk's actions.

    Args:
        reward: float (K, H). num_steps: int (K,), actions executed of each chunk, at least 1.
        value: float (K,). bootstrap: as in `gae`.

    Returns:
        advantage float64 (K, H), zero where not executed, and return at each chunk's first action, float64 (K,).
    """
    executed = np.arange(reward.shape[1]) < np.asarray(num_steps)[:, None]
    held = np.repeat(np.asarray(value, np.float64)[:, None], reward.shape[1], axis=1)
    flat, returns = gae(reward[executed], held[executed], bootstrap, gamma=gamma, gae_lambda=gae_lambda)
    advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
    advantage[executed], target[executed] = flat, returns
    return advantage, target[:, 0]


def whiten(advantage: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """(A - mean) / (std + eps) over all entries; a single entry is only shifted."""
    centered = advantage - advantage.mean()
    return centered / (advantage.std(ddof=1) + eps) if len(advantage) > 1 else centered


def shuffle_advantages(advantages: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The negative control: the same advantages dealt to other rows, over all groups and tasks.

    A gain that this control shares did not come from the reward.

    Args:
        advantages: (E, ...), permuted along the first axis.
    """
    return advantages[generator.permutation(len(advantages))]


def _rows_by_group(groups: np.ndarray) -> list[np.ndarray]:
    groups = np.asarray(groups)
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def _all_same(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())
