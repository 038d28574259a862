"""Checks of a `VecEnv`'s arguments, as `ValueError`s that say where, what, and what is allowed.

For those who write a `VecEnv`. Nothing here needs more than numpy and Python 3.10.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec

# Of one environment. "broken": its worker has died in its episode, which the next step counts as lost.
EnvStatus = Literal["never started", "running", "ended", "broken"]


def check_num_envs(num_envs: int) -> None:
    """There is at least one environment."""
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")


def checked_ids(env_ids: Sequence[int] | None, num_envs: int) -> list[int]:
    """Return the environments meant; None means all."""
    ids = list(range(num_envs)) if env_ids is None else [int(i) for i in env_ids]
    if not ids:
        raise ValueError("env_ids is empty: name at least one environment, or give None for all")
    if outside := [i for i in ids if not 0 <= i < num_envs]:
        raise ValueError(f"env_ids {outside}: this environment has ids 0 to {num_envs - 1}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"env_ids {ids}: each environment can be named once")
    return ids


def check_specs(specs: Sequence[EpisodeSpec], ids: Sequence[int], env: EnvSpec) -> None:
    """Check that there is a spec for each environment, and the task, split and initial state that each names."""
    if len(specs) != len(ids):
        raise ValueError(f"reset needs one spec per environment: got {len(specs)} specs for {len(ids)} environments")
    for spec in specs:
        if spec.task not in env.tasks:
            nearest = difflib.get_close_matches(str(spec.task), env.tasks, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"unknown task {spec.task!r} of {env.kind}.{hint} Tasks here: {', '.join(env.tasks)}.")
        if spec.split not in SPLITS:
            raise ValueError(f"unknown split {spec.split!r}: splits are {', '.join(SPLITS)}")
        limit = env.num_eval_states.get(spec.task) if spec.split == "eval" else None
        if spec.index < 0 or (limit is not None and spec.index >= limit):
            allowed = "0 and up" if limit is None else f"0 to {limit - 1}"
            raise ValueError(
                f"no initial state {spec.index} of {spec.task!r} in split {spec.split!r}: allowed {allowed}"
            )


def checked_actions(actions: np.ndarray, ids: Sequence[int], action_dim: int) -> np.ndarray:
    """Return the chunks as float32 (B, H, A), checked to hold no NaN."""
    array = np.asarray(actions, np.float32)
    if array.ndim != 3 or array.shape[0] != len(ids) or array.shape[1] < 1 or array.shape[2] != action_dim:
        expected = f"({len(ids)} environments, H >= 1, {action_dim} dimensions)"
        raise ValueError(f"actions have shape {array.shape}, expected {expected}")
    if np.isnan(array).any():
        row, step, dim = (int(x) for x in np.argwhere(np.isnan(array))[0])
        raise ValueError(f"actions hold NaN: environment {ids[row]}, action {step} of the chunk, dimension {dim}")
    return array


def check_started(method: str, ids: Sequence[int], status: Sequence[EnvStatus]) -> None:
    """Check that each of the environments `ids` has had an episode; `status` is that of all."""
    for i in ids:
        if status[i] == "never started":
            raise ValueError(f"{method}: environment {i} has no episode yet; call reset first")


def check_running(method: str, ids: Sequence[int], status: Sequence[EnvStatus]) -> None:
    """Check that no episode of the environments `ids` has ended; `status` is that of all."""
    check_started(method, ids, status)
    for i in ids:
        if status[i] == "ended":
            raise ValueError(
                f"{method}: the episode of environment {i} has ended; reset it, or leave it out of env_ids"
            )
