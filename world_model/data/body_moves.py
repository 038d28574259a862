"""What actions move a robot's body alone: recorded episodes replayed in a simulator of the robot.

A dynamics with `kinematics: body` is conditioned on it, so that it learns what contact changes, and not how the arm and
its controller move. Each control step's action is followed by S numbers: the change of the state.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.progress import step_progress
from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.data.keyframes import split_start
from vla_rl.interfaces import EnvConfig
from vla_rl.rollout.body import EmbodiedConfig
from vla_rl.types import EnvSpec, EpisodeSpec, Split

FILE = "body_moves.npy"
AT_ONCE = 64  # Episodes.
PROCESSES = 8  # At most, that replay more than those.


def moves_of(states: np.ndarray) -> np.ndarray:
    """What each of H control steps moved, float32 (..., H, S), of the states before and after them (..., H + 1, S).

    Zeros in what the body does not tell (NaN).
    """
    return np.nan_to_num(np.diff(states, axis=-2)).astype(np.float32)


def body_section(env: EnvConfig | None) -> dict[str, Any]:
    """An environment's section, for a world model's metadata.

    Raises:
        ConfigError: it is no simulator that moves the robot alone.
    """
    if env is None or not isinstance(env, EmbodiedConfig):
        found = "none" if env is None else repr(env.kind)
        raise ConfigError(
            "world_model.model.dynamics.kinematics: got 'body', for which env must be a simulator that moves the robot "
            f"alone (libero, tabletop, or your own with build_body, see vla_rl/rollout/body.py), not {found}; set "
            "it to delta_pose or none"
        )
    apart = {"kind", "tasks", "num_envs", "num_workers"}  # The robot is the same in every task.
    return {"kind": env.kind, **env.model_dump(mode="json", exclude_defaults=True, exclude=apart)}


def with_body_moves(dataset: EpisodeDataset, section: dict[str, Any], show: bool = False) -> EpisodeDataset:
    """Return the dataset with `body_moves`, replayed in the simulator of an env section and kept beside its cache.

    The first time takes some 3 ms a control step.

    Args:
        show: progress on the console.

    Raises:
        DatasetError: an episode that did not begin at one of the simulator's initial states.
    """
    env: EnvConfig = build_component("env", section)
    spec = env.env_spec()
    name = re.sub(r"\W+", "_", f"{spec.kind} {spec.suite}").strip("_")
    folder = dataset.cache.with_name(f"{dataset.cache.name}_body_{name}")
    if not folder.is_dir():
        with atomic_folder(folder, what="replay of the robot's body") as partial:
            np.save(partial / FILE, _replayed(dataset, env, spec, show))
    return replace(dataset, body_moves=np.load(folder / FILE, mmap_mode="r"))


def _replayed(dataset: EpisodeDataset, env: EnvConfig, spec: EnvSpec, show: bool) -> np.ndarray:
    """float32 (N, S)."""
    assert isinstance(env, EmbodiedConfig), "checked when the section was made"
    moves = np.zeros((len(dataset.actions), dataset.state.shape[1]), np.float32)
    order = sorted(range(len(dataset.starts)), key=lambda e: (dataset.task[dataset.starts[e]], dataset.lengths[e]))
    if "num_workers" in type(env).model_fields and len(order) > AT_ONCE:
        env = env.model_copy(update={"num_workers": min(PROCESSES, os.cpu_count() or 1)})
    with (
        closing(env.build_body()) as body,
        step_progress(f"body of {dataset.name}", len(order), show, " episodes/s") as advance,
    ):
        for done in range(0, len(order), AT_ONCE):
            episodes = order[done : done + AT_ONCE]
            at, first = body.begin([_start(dataset, episode, spec) for episode in episodes])
            actions = np.zeros((len(episodes), dataset.lengths[episodes].max(), dataset.actions.shape[1]), np.float32)
            rows = [slice(dataset.starts[e], dataset.starts[e] + dataset.lengths[e]) for e in episodes]
            for i, own in enumerate(rows):
                actions[i, : own.stop - own.start] = dataset.executed_actions[own]
            _, states = body.step(at, actions)
            found = moves_of(np.concatenate([first[:, None], states], 1))
            for i, own in enumerate(rows):
                moves[own] = found[i, : own.stop - own.start]
            advance(done + len(episodes), "")
    return moves


def _start(dataset: EpisodeDataset, episode: int, spec: EnvSpec) -> EpisodeSpec:
    """Where a recorded episode began.

    Raises:
        DatasetError: not at one of the simulator's initial states.
    """
    name = dataset.initial_states[episode]
    task, split, index = split_start(name)
    if task not in spec.tasks:
        raise DatasetError(
            f"{dataset.path}: episode {episode} began at {name!r}, which is no initial state of {spec.kind} "
            f"{spec.suite}; kinematics=body needs episodes that were collected in that simulator; otherwise set "
            "world_model.model.dynamics.kinematics to delta_pose or none"
        )
    return EpisodeSpec(task, cast(Split, split), index)
