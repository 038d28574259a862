"""Statistics of actions and states by which a policy normalizes them, in OpenVLA's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.data.dataset import EpisodeDataset


def compute_statistics(parts: Sequence[EpisodeDataset]) -> dict[str, Any]:
    """Statistics over the selected frames of all datasets together.

    Returns:
        {"action": s, "proprio": s, "num_transitions", "num_trajectories"}, where s holds lists mean, std, min,
        max, q01, q99 (one number a dimension) and, for actions, mask: False for the gripper, the last dimension,
        which is used as it is (see `_is_gripper`). "proprio" is missing where there is no state.
    """
    actions = np.concatenate([part.actions[part.rows] for part in parts])
    state = np.concatenate([part.state[part.rows] for part in parts])
    result: dict[str, Any] = {
        "action": _describe(actions) | {"mask": [True] * (actions.shape[1] - 1) + [not _is_gripper(actions[:, -1])]},
        "num_transitions": len(actions),
        "num_trajectories": sum(part.num_episodes for part in parts),
    }
    if state.shape[1]:
        result["proprio"] = _describe(state)
    return result


def _is_gripper(last: np.ndarray) -> bool:
    """Whether the last number of actions is a gripper's that policies can give as it is: -1 or 0 to 1.

    Others are normalized as all numbers: 0 to 100, as LeRobot's arms have it, is beyond what a policy gives, and of an
    arm without a gripper the last number is a motion.
    """
    largest = float(np.abs(last).max())
    return largest == 0 or 0.5 <= largest <= 1


def _describe(values: np.ndarray) -> dict[str, list]:
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    numbers = {
        "mean": values.mean(0, dtype=np.float64),
        "std": values.std(0, dtype=np.float64),
        "min": values.min(0),
        "max": values.max(0),
        "q01": q01,
        "q99": q99,
    }
    return {name: np.asarray(value, np.float64).tolist() for name, value in numbers.items()}
