"""What callers of a `VecEnv` may get wrong, as `ValueError`s that say which environment, what, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np

from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec


def checked_ids(env_ids: Sequence[int] | None, num_envs: int) -> list[int]:
    """The environments meant; None means all."""
    ids = list(range(num_envs)) if env_ids is None else [int(i) for i in env_ids]
    if not ids:
        raise ValueError("env_ids: is empty; name at least one environment, or give None for all")
    if not set(ids) <= set(range(num_envs)):
        raise ValueError(f"env_ids: got {ids}, allowed are 0 to {num_envs - 1}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"env_ids: got {ids}; each environment can be named once")
    return ids


def check_episode(spec: EpisodeSpec, env: EnvSpec) -> None:
    """The environment has the task, the split and the initial state."""
    if spec.task not in env.tasks:
        nearest = difflib.get_close_matches(str(spec.task), env.tasks, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"task: {env.kind} has no {spec.task!r}.{hint} It has: {', '.join(env.tasks)}.")
    if spec.split not in SPLITS:
        raise ValueError(f"split: got {spec.split!r}, allowed are {', '.join(SPLITS)}")
    limit = env.num_eval_states.get(spec.task) if spec.split == "eval" else None
    if spec.index < 0 or (limit is not None and spec.index >= limit):
        allowed = "0 and up" if limit is None else f"0 to {limit - 1}"
        raise ValueError(f"index: {spec.task} has no initial state {spec.index} in {spec.split}; allowed: {allowed}")


def checked_actions(actions: np.ndarray, ids: Sequence[int], action_dim: int) -> np.ndarray:
    """float32 (B, H, A), without NaN."""
    array = np.asarray(actions, np.float32)
    if array.ndim != 3 or array.shape != (len(ids), max(array.shape[1], 1), action_dim):
        raise ValueError(f"actions: got shape {array.shape}, expected ({len(ids)}, H, {action_dim}) with H at least 1")
    if np.isnan(array).any():
        row, step, dim = np.argwhere(np.isnan(array))[0]
        raise ValueError(f"actions: NaN for environment {ids[row]}, action {step} of the chunk, dimension {dim}")
    return array
