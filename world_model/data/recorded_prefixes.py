"""Recorded prefixes: real frames and actions before a keyframe, from which an imagined episode begins.

The world model remembers all of them, from the episode's first frame (the reference) on, as if it had watched: its
memory is that of a replay, with frame numbers and noise in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_rl.data.config import DatasetConfig
from vla_rl.data.keyframes import RECORDED, KeyframeError
from vla_rl.types import EpisodeSpec, Keyframe
from world_model.data.episodes import EpisodeFrames, LoggedEpisode, logged_episodes, open_episodes
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.types import Actions, Frames

MAX_KEPT = 512  # Encoded prefixes: the episodes of a group all begin with the same.


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
