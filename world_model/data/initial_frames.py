"""Initial frames of imagined episodes: from a simulator that is reset but never stepped, or from a dataset."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.data.keyframes import split_start
from vla_rl.interfaces import VecEnv
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Observation
from world_model.data.episodes import open_episodes
from world_model.metadata import WorldModelMetadata

MAX_KEPT = 512  # Rendered first frames: the episodes of a group all begin with the same.


class InitialFrames(Protocol):
    """Gives real first frames."""

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """What is seen at the start of each episode, or at its keyframe.

        Raises:
            ValueError: an initial state that there is not.
        """
        ...

    def close(self) -> None:
        """Release workers and renderers. May be called twice."""
        ...


class SimulatedInitialFrames:
    """First frames rendered by a real environment, which is only reset, so that initial states cost next to nothing."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        # The keyframe is held, so that no other one gets its id.
        self._kept: OrderedDict[tuple[EpisodeSpec, int], tuple[EpisodeSpec, Observation]] = OrderedDict()

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """See `InitialFrames`; a keyframe is the environment's own."""
        wanted = {(spec, id(spec.keyframe)): spec for spec in specs}
        found = {key: self._kept[key][1] for key in wanted if key in self._kept}
        missing = [key for key in wanted if key not in found]
        for start in range(0, len(missing), self.env.num_envs):
            keys = missing[start : start + self.env.num_envs]
            obs = self.env.reset([wanted[key] for key in keys], range(len(keys)))
            for row, key in enumerate(keys):
                found[key] = obs.select([row])
                self._kept[key] = (wanted[key], found[key])
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return Observation.concatenate([found[spec, id(spec.keyframe)] for spec in specs])

    def close(self) -> None:
        """See `InitialFrames`."""
        self.env.close()


class RecordedInitialFrames:
    """First frames of recorded episodes.

    An episode whose initial state was recorded stands for that state. One of another source stands for a `train` state
    of the task with its instruction; these are numbered in the datasets' order.

    Args:
        tasks: task -> instruction.

    Raises:
        DatasetError: no episode of some task.
    """

    def __init__(self, datasets: Sequence[EpisodeDataset], tasks: dict[str, str]) -> None:
        self._places: dict[tuple[str, str, int], tuple[EpisodeDataset, int]] = {}
        counts: defaultdict[str, int] = defaultdict(int)
        for dataset in datasets:
            for episode in dataset.episodes.tolist():
                task, split, index = split_start(dataset.initial_states[episode])
                if split not in SPLITS:
                    instruction = dataset.instructions[dataset.task[dataset.starts[episode]]]
                    task = next((name for name, text in tasks.items() if text == instruction), "")
                    split, index = "train", counts[task]
                    counts[task] += 1
                if task in tasks:
                    self._places.setdefault((task, split, index), (dataset, int(dataset.starts[episode])))
        for task, text in tasks.items():
            if not any(name == task for name, _, _ in self._places):
                paths = ", ".join(str(dataset.path) for dataset in datasets)
                raise DatasetError(
                    f"env.datasets: no episode of task {task!r} ({text!r}) in {paths}; leave it out of env.tasks, or "
                    "add a dataset"
                )

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """See `InitialFrames`."""
        return Observation.concatenate([self._one(spec) for spec in specs])

    def _one(self, spec: EpisodeSpec) -> Observation:
        if spec.keyframe is not None:
            raise ValueError(
                f"keyframe: is of {spec.keyframe.env!r}, which only that simulator shows; give it as env.first_frames"
            )
        place = self._places.get((spec.task, spec.split, spec.index))
        if place is None:
            known = sorted(i for task, split, i in self._places if (task, split) == (spec.task, spec.split))
            there = f"{len(known)}, numbered {known[0]} to {known[-1]}" if known else "none"
            raise ValueError(
                f"env.datasets: no episode begins at {spec.task}/{spec.split}/{spec.index}; of this task and split "
                f"there are {there}. Set sampling.first_state and sampling.train_states to those."
            )
        dataset, row = place
        instruction = spec.instruction or dataset.instructions[dataset.task[row]]
        images = {camera: frames[row : row + 1] for camera, frames in dataset.images.items()}
        return Observation(images, dataset.state[row : row + 1], [instruction])

    def close(self) -> None:
        """See `InitialFrames`."""


def open_recorded(
    configs: Sequence[DatasetConfig], metadata: WorldModelMetadata, tasks: dict[str, str]
) -> RecordedInitialFrames:
    """First frames of datasets that fit the world model.

    Raises:
        DatasetError: missing or damaged, other cameras, sizes or fps, or no episode of some task.
    """
    return RecordedInitialFrames([open_episodes(config, metadata.env_spec()) for config in configs], tasks)


def check_alike(metadata: WorldModelMetadata, real: EnvSpec, tasks: Sequence[str]) -> None:
    """The real environment shows, and is moved, as the world model was fitted.

    Raises:
        ConfigError: naming each camera, size, rate or bound that differs.
    """
    problems = [
        f"{name}: the world model has {ours}, env.first_frames has {theirs}; {remedy}"
        for name, ours, theirs, remedy in (
            ("image size", metadata.image_size, tuple(real.image_size), "set env.first_frames.image_size"),
            ("state dimensions", metadata.state_dim, real.state_dim, "it is another robot"),
            ("action dimensions", metadata.action_dim, real.action_dim, "it is another robot or another control mode"),
            ("control Hz", metadata.control_hz, real.control_hz, "set its rate to the world model's"),
        )
        if ours != theirs
    ]
    if lacking := [camera for camera in metadata.cameras if camera not in real.cameras]:
        problems.insert(
            0,
            f"cameras: the world model shows {list(metadata.cameras)}, env.first_frames lacks {lacking}; "
            f"set env.first_frames.cameras to {list(metadata.cameras)}",
        )
    if metadata.action_dim == real.action_dim:
        low, high = np.float32(real.action_low).tolist(), np.float32(real.action_high).tolist()
        if not np.allclose((low, high), (metadata.action_low, metadata.action_high)):
            problems.append(
                f"action bounds: the world model has {metadata.action_low} .. {metadata.action_high}, env.first_frames "
                f"has {low} .. {high}; it is another control mode"
            )
    if unknown := [task for task in tasks if task not in real.tasks]:
        problems.append(
            f"tasks: env.first_frames has no {unknown}, it has {list(real.tasks)}; set env.tasks, or its own"
        )
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the world model and env.first_frames do not fit:\n{lines}")
