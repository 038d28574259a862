"""Initial frames of imagined episodes: from a simulator that is reset but never stepped, or from a dataset.

An episode that begins at a keyframe of a dataset has the recorded frames and actions before it. The world model
remembers all of them, from the episode's first frame (the reference) on, as if it had watched: its memory is that of a
replay, with frame numbers and noise in their places.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.data.keyframes import RECORDED, KeyframeError, split_start
from vla_rl.interfaces import VecEnv
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe, Observation
from world_model.data.episodes import EpisodeFrames, LoggedEpisode, logged_episodes, open_episodes
from world_model.metadata import WorldModelMetadata
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.types import Actions, Frames

MAX_KEPT = 512  # Rendered first frames, and encoded prefixes: the episodes of a group all begin with the same.


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


@dataclass(frozen=True)
class RecordedPrefix:
    """What led to a keyframe.

    Attributes:
        frames, actions: 1 x T, from the episode's first frame to the keyframe.
        images: uint8 (V, height, width, 3), state: float32 (S,), what is seen at the keyframe.
    """

    frames: Frames
    actions: Actions
    images: np.ndarray
    state: np.ndarray
    instruction: str

    @property
    def num_frames(self) -> int:
        return self.frames.states.shape[1]


def remember(world_model: WorldModel, prefixes: Sequence[RecordedPrefix], seeds: Sequence[int]) -> Memory:
    """The world model's memory after B prefixes, which may differ in length.

    Args:
        seeds: of each episode's noise, of 64 bits.
    """
    first = Frames.joined([b.frames.at(slice(0, 1)) for b in prefixes])
    memory = world_model.begin(first, [b.instruction for b in prefixes], seeds)
    for number in range(1, max(b.num_frames for b in prefixes)):
        here = slice(number, number + 1)
        rows = [i for i, b in enumerate(prefixes) if b.num_frames > number]
        frames = Frames.joined([prefixes[i].frames.at(here) for i in rows])
        actions = [prefixes[i].actions.at(here) for i in rows]
        done = Actions(torch.cat([a.values for a in actions]), torch.cat([a.executed for a in actions]))
        if len(rows) == len(prefixes):
            memory = world_model.extend(memory, frames, done)
        else:
            memory = memory.put(rows, world_model.extend(memory.select(rows), frames, done))
    return memory


class RecordedPrefixes:
    """Reads and encodes prefixes from the datasets that keyframes name; each dataset is opened once."""

    def __init__(self, world_model: WorldModel) -> None:
        self.world_model = world_model
        self._opened: dict[str, EpisodeFrames] = {}
        self._kept: OrderedDict[tuple[str, int, int], RecordedPrefix] = OrderedDict()

    def of(self, spec: EpisodeSpec) -> RecordedPrefix:
        """The beginning of an episode at a keyframe of a recorded one (`KeyframeSet.recorded`).

        Raises:
            KeyframeError: the dataset changed, has no such episode, or none of its frames is at that step.
            DatasetError: the dataset is missing or damaged, or of another robot or cameras.
        """
        keyframe = spec.keyframe
        if keyframe is None or keyframe.env != RECORDED:
            raise KeyframeError("a beginning needs a keyframe of a recorded episode (vla-rl world-model keyframes)")
        path, content = _text(keyframe, "dataset"), _text(keyframe, "content")
        key = (path, int(keyframe.arrays["episode"]), keyframe.step)
        if key not in self._kept:
            self._kept[key] = self._encoded(cut_episode(self._frames(path, content), key[1], keyframe.step))
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        found = self._kept[key]
        if spec.instruction is None:
            return found
        return RecordedPrefix(found.frames, found.actions, found.images, found.state, spec.instruction)

    def _frames(self, path: str, content: str) -> EpisodeFrames:
        if path not in self._opened:
            spec = self.world_model.metadata.env_spec()
            if not Path(path).is_dir():
                raise KeyframeError(
                    f"{path}: the dataset that keyframes were mined from is gone, so they cannot be restored. Put it "
                    "back, or mine keyframes again (`vla-rl world-model keyframes`)."
                )
            dataset = open_episodes(DatasetConfig(path=path), spec, body=self.world_model.metadata.body)
            if dataset.cache.name != content:
                raise KeyframeError(
                    f"{path}: has changed since keyframes were mined from it, or the world model has other cameras. "
                    "Mine them again with `vla-rl world-model keyframes`."
                )
            steps = self.world_model.frame_steps
            self._opened[path] = EpisodeFrames.of(dataset, steps, spec.action_low, spec.action_high)
        return self._opened[path]

    def _encoded(self, episode: LoggedEpisode) -> RecordedPrefix:
        device = self.world_model.device
        return RecordedPrefix(
            self.world_model.encode(episode.images[None], episode.states[None]),
            Actions(
                torch.from_numpy(episode.actions[None]).to(device), torch.from_numpy(episode.executed[None]).to(device)
            ),
            episode.images[-1],
            episode.states[-1],
            episode.instruction,
        )


def cut_episode(frames: EpisodeFrames, episode: int, step: int) -> LoggedEpisode:
    """A recorded episode up to a control step.

    Args:
        episode: number in the dataset.

    Raises:
        KeyframeError: no such episode, or no frame of it is at that step.
    """
    place = np.flatnonzero(frames.episodes == episode)
    if not len(place):
        raise KeyframeError(f"{frames.dataset.path}: has no episode {episode}; mine keyframes again")
    number, rest = divmod(step, frames.frame_steps)
    last = int(frames.counts[place[0]]) - 1
    if rest or not 0 < number < last:
        raise KeyframeError(
            f"{frames.dataset.path}: episode {episode} cannot be restored at control step {step}: the world model's "
            f"frames are {frames.frame_steps} steps apart, and of this episode's, 1 to {last - 1} can begin another. "
            "Mine keyframes again with this world model."
        )
    whole = logged_episodes(frames, [int(place[0])])[0]
    return LoggedEpisode(
        images=whole.images[: number + 1],
        states=whole.states[: number + 1],
        actions=whole.actions[: number + 1],
        executed=whole.executed[: number + 1],
        success=whole.success[: number + 1],
        instruction=whole.instruction,
        start=whole.start,
    )


def _text(keyframe: Keyframe, name: str) -> str:
    return keyframe.arrays[name].tobytes().decode()
