"""Statistics of actions and states by which a policy normalizes them, in OpenVLA's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.data.dataset import EpisodeDataset


def compute_statistics(parts: Sequence[EpisodeDataset]) -> dict[str, Any]:
    """Statistics over the selected frames of all datasets together.

    Returns:
        {"action": s, "proprio": s, "num_transitions", "num_trajectories"}, where s holds lists mean, std, min, max,
        q01, q10, q90, q99 (one number a dimension) and, for actions, mask: False for a gripper that is used as it is
        (see `_fits`). "proprio" is missing where there is no state.
    """
    actions = np.concatenate([part.actions[part.rows] for part in parts])
    state = np.concatenate([part.state[part.rows] for part in parts])
    grippers = set.intersection(*(set(part.grippers) for part in parts))
    mask = [number not in grippers or not _fits(values) for number, values in enumerate(actions.T)]
    result: dict[str, Any] = {
        "action": _describe(actions) | {"mask": mask},
        "num_transitions": len(actions),
        "num_trajectories": sum(part.num_episodes for part in parts),
    }
    if state.shape[1]:
        result["proprio"] = _describe(state)
    return result


def unlike(known: Any, parts: Sequence[EpisodeDataset]) -> str:
    """How the actions to learn from differ from those that a policy's statistics were made of; empty where they do not.

    They differ where more than a tenth of a dimension's are three times as far from the middle as the statistics reach,
    or where none that moves fills a twentieth of their range: another robot, or other units.

    Args:
        known: a policy's `norm_stats`, in the form of one of ours; any other is not compared.
    """
    bounds = action_range(known)
    actions = np.concatenate([part.actions[part.rows] for part in parts])
    if bounds is None or bounds.shape[1:] != actions.shape[1:]:
        return ""
    low, high = bounds
    q01, q99 = np.quantile(actions, [0.01, 0.99], axis=0)
    reach = (high - low) / 2
    far = (np.abs(actions - (low + high) / 2) > 3 * reach).mean(0) > 0.1
    narrow = (q99 - q01 < 0.1 * reach)[(reach > 0) & (q99 > q01)]
    if not far[reach > 0].any() and not (narrow.size and narrow.all()):
        return ""
    found, expected = (
        ", ".join(f"{first:.3g} to {last:.3g}" for first, last in zip(*pair, strict=True))
        for pair in ((q01, q99), (low, high))
    )
    return f"the actions to learn from are {found}; those of the policy's statistics {expected}"


def action_range(known: Any) -> np.ndarray | None:
    """float64 (2, A), from where to where a policy's statistics say that actions are; equal where they are not used."""
    known = getattr(known, "action", known)
    names = ("q01", "q99", "min", "max", "mean", "std", "mask")
    values = {
        name: value
        for name in names
        if (value := known.get(name) if isinstance(known, Mapping) else getattr(known, name, None)) is not None
        and not callable(value)
    }
    numbers = {name: np.asarray(value, np.float64) for name, value in values.items()}
    if "mean" in numbers and "std" in numbers:
        spread = 2.33 * numbers["std"]
        numbers |= {"low": numbers["mean"] - spread, "high": numbers["mean"] + spread}
    for low, high in (("q01", "q99"), ("min", "max"), ("low", "high")):
        if low in numbers and high in numbers:
            used = numbers.get("mask", np.ones_like(numbers[low])) > 0
            return np.stack([numbers[low], np.where(used, numbers[high], numbers[low])])
    return None


def _fits(gripper: np.ndarray) -> bool:
    """Whether a gripper's commands are such as policies give as they are: -1 or 0 to 1.

    Others are normalized as all numbers: 0 to 100, as LeRobot's arms have it, is beyond what a policy gives.
    """
    largest = float(np.abs(gripper).max())
    return largest == 0 or 0.5 <= largest <= 1


def _describe(values: np.ndarray) -> dict[str, list]:
    q01, q10, q90, q99 = np.quantile(values, [0.01, 0.1, 0.9, 0.99], axis=0)
    numbers = {
        "mean": values.mean(0, dtype=np.float64),
        "std": values.std(0, dtype=np.float64),
        "min": values.min(0),
        "max": values.max(0),
        "q01": q01,
        "q10": q10,
        "q90": q90,
        "q99": q99,
    }
    return {name: np.asarray(value, np.float64).tolist() for name, value in numbers.items()}
