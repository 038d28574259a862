"""Training batches from encoded episodes: clips for the dynamics, or `clip_source`; labels for the success head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vla_rl.config import Config
from vla_rl.data.config import DatasetError
from world_model.data.episodes import check_states
from world_model.data.latents import EncodedEpisodes, has_room, stacked, uploaded
from world_model.interfaces import Dynamics
from world_model.types import Actions, Clip, Frames

NEAR_FRAMES = 2  # Before a success, or at the end of a failure, that count as a near-success.


@dataclass(frozen=True)
class HeldFrames:
    """M frames on a device, their parts' one after another, from `starts`.

    Attributes:
        latents: float16 (M, V, C, h, w). states: float32 (M, S), normalized.
        values, executed, success: what led to each frame, and if it shows success; none where only `frames` is asked.
    """

    starts: np.ndarray
    latents: torch.Tensor
    states: torch.Tensor
    values: torch.Tensor
    executed: torch.Tensor
    success: torch.Tensor

    def clip(self, which: np.ndarray, frame: np.ndarray, valid: np.ndarray, first: np.ndarray, text: list[str]) -> Clip:
        """See `ClipDataset.clip_of`."""
        packed = np.concatenate([self.starts[which][:, None] + frame, valid, first[:, None]], 1)
        index, length = uploaded(packed, self.latents.device), frame.shape[1]
        index, valid_there, first_there = index[:, :length], index[:, length:-1] > 0, index[:, -1]
        executed = self.executed[index] & valid_there[..., None]
        actions = Actions(self.values[index] * executed[..., None], executed)
        return Clip(self.frames(index), actions, first_there, valid_there, self.success[index], text)

    def frames(self, index: torch.Tensor) -> Frames:
        """Frames at int64 (B, F), on the device, counted over all parts."""
        return Frames(self.latents[index].float(), self.states[index])


class ClipDataset:
    """Clips of one or several sets of episodes. What a step draws depends on (seed, step) alone.

    Args:
        parts: each batch draws from them in proportion to their datasets' weights.
        clip_frames: T, the reference included. state_mean, state_std: (S,), states are normalized with these.

    Raises:
        DatasetError: parts that do not fit each other, or states of another size or scale than the mean's.
    """

    def __init__(
        self, parts: Sequence[EncodedEpisodes], clip_frames: int, state_mean: np.ndarray, state_std: np.ndarray
    ) -> None:
        if not parts:
            raise DatasetError("no dataset given; set datasets to at least one folder")
        _check_alike(parts)
        self.parts, self.clip_frames = list(parts), clip_frames
        self.state_mean, self.state_std = np.asarray(state_mean, np.float32), np.asarray(state_std, np.float32)
        for part in parts:
            check_states(part.frames, self.state_mean, self.state_std)
        weights = np.array([part.frames.dataset.weight for part in parts], np.float64)
        self._share = weights / weights.sum()
        # Any frame but the first of a chosen episode.
        self._targets = [_frames_of(part)[part.frames.number[_frames_of(part)] > 0] for part in parts]
        self.held: HeldFrames | None = None  # On a device, from which clips then come; see `hold`.

    def hold(self, device: torch.device, beside: int = 0) -> None:
        """Keep all frames on a device that has room for them and for `beside` bytes."""
        parts = self.parts
        if not has_room(sum(part.latents.nbytes for part in parts) + beside, device, "frames to learn from"):
            return
        every = [np.arange(part.frames.num_frames) for part in parts]
        actions = [part.frames.actions(index) for part, index in zip(parts, every, strict=True)]
        self.held = HeldFrames(
            np.cumsum([0, *map(len, every)])[:-1],
            stacked([part.latents for part in parts], device),
            stacked([self.states(i, index) for i, index in enumerate(every)], device),
            stacked([values for values, _ in actions], device),
            stacked([executed for _, executed in actions], device),
            stacked([part.frames.success(index) for part, index in zip(parts, every, strict=True)], device),
        )

    @property
    def num_episodes(self) -> int:
        return sum(len(part.chosen) for part in self.parts)

    def locate(self, number: int) -> tuple[int, int]:
        """Part, and episode in it, of one of all the chosen episodes, numbered part by part."""
        for part, encoded in enumerate(self.parts):
            if number < len(encoded.chosen):
                return part, int(encoded.chosen[number])
            number -= len(encoded.chosen)
        raise IndexError(f"there are {self.num_episodes} episodes")

    def batch(self, size: int, seed: int, step: int) -> Clip:
        """`size` clips: a frame drawn at random, and a random window around it that stays inside its episode."""
        return self.clip_of(*self.draw(size, seed, step))

    def draw(
        self, size: int, seed: int, step: int, among: Sequence[np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What `clip_of` makes clips of: which, frame, valid, first.

        Args:
            among: of each part, the frames that may be drawn; None: all but the first of each episode.
        """
        share = self._share
        if among is None:
            among = self._targets
        else:
            share = share * [len(targets) > 0 for targets in among]
            share = share / share.sum()
        rng = np.random.default_rng([seed, step])
        which = rng.choice(len(self.parts), size, p=share)
        target = rng.random(size)
        before = rng.integers(self.clip_frames - 1, size=size)
        frame = np.zeros((size, self.clip_frames), np.int64)
        valid = np.ones((size, self.clip_frames), bool)
        first = np.zeros(size, np.int64)
        for i, part in enumerate(self.parts):
            rows = which == i
            targets = among[i][(target[rows] * len(among[i])).astype(np.int64)]
            owner = part.frames.owner[targets]
            latest = np.maximum(part.frames.counts[owner] - self.clip_frames + 1, 1)
            first[rows] = np.clip(part.frames.number[targets] - before[rows], 1, latest)
            number = first[rows][:, None] + np.arange(-1, self.clip_frames - 1)
            number[:, 0] = 0
            last = part.frames.counts[owner][:, None] - 1
            valid[rows] = number <= last
            frame[rows] = part.frames.starts[owner][:, None] + np.minimum(number, last)
        return which, frame, valid, first

    def clip_of(self, which: np.ndarray, frame: np.ndarray, valid: np.ndarray, first: np.ndarray | None = None) -> Clip:
        """The clip of given frames.

        Args:
            which: int64 (B,), parts. frame: int64 (B, T), frames of them. valid: bool (B, T).
            first: see `Clip`; None: 1.
        """
        size, length = frame.shape
        first = np.ones(size, np.int64) if first is None else first
        if self.held is not None:
            return self.held.clip(which, frame, valid, first, self.instruction(which, frame[:, 0]))
        template = self.parts[0].frames
        values = np.zeros((size, length, template.frame_steps, template.num_values), np.float32)
        executed = np.zeros((size, length, template.frame_steps), bool)
        success = np.zeros((size, length), bool)
        for i, part in enumerate(self.parts):
            rows = which == i
            values[rows], executed[rows] = part.frames.actions(frame[rows])
            success[rows] = part.frames.success(frame[rows])
        executed &= valid[..., None]
        values *= executed[..., None]
        return Clip(
            frames=self.frames(which, frame),
            actions=Actions(torch.from_numpy(values), torch.from_numpy(executed)),
            first=torch.from_numpy(first),
            valid=torch.from_numpy(valid),
            success=torch.from_numpy(success),
            instruction=self.instruction(which, frame[:, 0]),
        )

    def frames(self, which: np.ndarray, frame: np.ndarray) -> Frames:
        """Frames `frame`, int64 (B, F), of the parts `which`, int64 (B,)."""
        latents = np.zeros((*frame.shape, *self.parts[0].latents.shape[1:]), np.float32)
        states = np.zeros((*frame.shape, len(self.state_mean)), np.float32)
        for i, part in enumerate(self.parts):
            rows = which == i
            latents[rows] = part.latents[frame[rows]]
            states[rows] = self.states(i, frame[rows])
        return Frames(torch.from_numpy(latents), torch.from_numpy(states))

    def states(self, part: int, frame: np.ndarray) -> np.ndarray:
        """Normalized, float32 (..., S), of frames `frame`, int64 (...), of a part."""
        raw = self.parts[part].frames.states(frame.reshape(-1)).reshape(*frame.shape, len(self.state_mean))
        return (raw - self.state_mean) / self.state_std

    def instruction(self, which: np.ndarray, frame: np.ndarray) -> list[str]:
        """Of frames `frame`, int64 (B,), of the parts `which`, int64 (B,)."""
        return [self.parts[i].frames.instruction(np.array([f]))[0] for i, f in zip(which, frame, strict=True)]


@dataclass(frozen=True)
class SuccessBatch:
    """Arguments of `SuccessHead.loss`: frames B x R, reference B x 1, B instructions, success bool (B,)."""

    frames: Frames
    reference: Frames
    instruction: list[str]
    success: torch.Tensor

    @staticmethod
    def concatenate(parts: Sequence[SuccessBatch]) -> SuccessBatch:
        """One batch from several, in order."""

        def join(frames: list[Frames]) -> Frames:
            return Frames.joined(frames)

        return SuccessBatch(
            join([part.frames for part in parts]),
            join([part.reference for part in parts]),
            [text for part in parts for text in part.instruction],
            torch.cat([part.success for part in parts]),
        )

    def to(self, device: torch.device | str) -> SuccessBatch:
        """The same on another device."""
        frames, reference = (Frames(f.latents.to(device), f.states.to(device)) for f in (self.frames, self.reference))
        return SuccessBatch(frames, reference, self.instruction, self.success.to(device))


def labeled_windows(
    clips: ClipDataset, which: np.ndarray, frame: np.ndarray, num_frames: int, success: np.ndarray
) -> SuccessBatch:
    """The last `num_frames` frames up to each of `frame`, int64 (B,), of the parts `which`, with labels, bool (B,)."""
    start, window = windows(clips, which, frame, num_frames)
    return SuccessBatch(
        frames=clips.frames(which, window),
        reference=clips.frames(which, start[:, None]),
        instruction=clips.instruction(which, start),
        success=torch.from_numpy(success),
    )


def windows(clips: ClipDataset, which: np.ndarray, frame: np.ndarray, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each of `frame`: its episode's first frame, int64 (B,), and the last R up to it, int64 (B, R)."""
    start = np.zeros(len(frame), np.int64)
    for i, part in enumerate(clips.parts):
        start[which == i] = part.frames.starts[part.frames.owner[frame[which == i]]]
    return start, np.maximum(frame[:, None] + np.arange(1 - num_frames, 1), start[:, None])


class SuccessSamples:
    """Labeled windows for the success head, a third each of successes, near-successes and others.

    Near-successes are the last two frames before an episode succeeds and the last two of an episode that failed: what
    a head must tell from success (SANS of World-VLA-Loop, arXiv 2602.06508, is to collect them). Others are all other
    frames without success. A kind that the episodes lack is left out. Episodes' first frames are not asked about.

    Args:
        clips: whose episodes, weights and normalization to take. num_frames: R.

    Raises:
        DatasetError: no success, or nothing but successes.
    """

    def __init__(self, clips: ClipDataset, num_frames: int) -> None:
        self._clips, self._num_frames = clips, num_frames
        which, frame, kind, weight = [], [], [], []
        for i, part in enumerate(clips.parts):
            index = _frames_of(part)
            index = index[part.frames.number[index] > 0]
            kinds = _kinds(part, index)
            which.append(np.full(len(index), i))
            frame.append(index)
            kind.append(kinds)
            weight.append(np.full(len(index), part.frames.dataset.weight / len(index)))
        kinds = np.concatenate(kind)
        self._which, self._frame = np.concatenate(which), np.concatenate(frame)
        self._pools = [np.flatnonzero(kinds == k) for k in range(3)]
        self._cumulative = [np.cumsum(np.concatenate(weight)[pool]) for pool in self._pools]
        self._kinds = [k for k, pool in enumerate(self._pools) if len(pool)]
        if 0 not in self._kinds or len(self._kinds) < 2:
            found = "no success" if 0 not in self._kinds else "nothing but successes"
            raise DatasetError(
                f"{', '.join(str(part.frames.dataset.path) for part in clips.parts)}: {found} in {clips.num_episodes} "
                "episodes; a success head needs both. Collect with collect.keep=all, from a policy that sometimes "
                "succeeds."
            )

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many frames there are: successes, near-successes, others."""
        success, near, others = (len(pool) for pool in self._pools)
        return success, near, others

    def batch(self, size: int, seed: int, step: int) -> SuccessBatch:
        """`size` windows, the same for the same (seed, step)."""
        which, frame, success = self._draw(size, seed, step)
        return labeled_windows(self._clips, which, frame, self._num_frames, success)

    def numbers(self, size: int, seed: int, step: int) -> tuple[np.ndarray, list[str]]:
        """What `batch` is of, as `HeldFrames` counts frames: reference, window, label, int64 (size, R + 2); texts."""
        held = self._clips.held
        assert held is not None, "frames are held on the device"
        which, frame, success = self._draw(size, seed, step)
        start, window = windows(self._clips, which, frame, self._num_frames)
        found = np.concatenate([start[:, None], window], 1) + held.starts[which][:, None]
        return np.concatenate([found, success[:, None]], 1), self._clips.instruction(which, start)

    def _draw(self, size: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Parts, frames of them, and labels."""
        rng = np.random.default_rng([seed, step])
        kind = rng.choice(self._kinds, size)
        drawn = np.zeros(size, np.int64)
        for k in self._kinds:
            at = rng.random(int((kind == k).sum())) * self._cumulative[k][-1]
            position = np.searchsorted(self._cumulative[k], at, side="right")
            drawn[kind == k] = self._pools[k][np.minimum(position, len(self._pools[k]) - 1)]
        return self._which[drawn], self._frame[drawn], kind == 0


def _kinds(part: EncodedEpisodes, index: np.ndarray) -> np.ndarray:
    """Of frames `index`: 0 success, 1 near-success, 2 other."""
    frames = part.frames
    success = frames.success(np.arange(frames.num_frames))
    end = frames.counts.copy()  # Of the part without success: the number of the first frame with it.
    np.minimum.at(end, frames.owner[success], frames.number[success])
    near = frames.number >= end[frames.owner] - NEAR_FRAMES
    return np.where(success, 0, np.where(near, 1, 2))[index]


def _frames_of(part: EncodedEpisodes) -> np.ndarray:
    """Frames of the chosen episodes, int64."""
    return np.flatnonzero(np.isin(part.frames.owner, part.chosen))


def _check_alike(parts: Sequence[EncodedEpisodes]) -> None:
    metadata = {
        "frame_steps": [part.frames.frame_steps for part in parts],
        "cameras": [part.frames.cameras for part in parts],
        "fps": [part.frames.dataset.fps for part in parts],
        "size of a latent": [part.latents.shape[1:] for part in parts],
        "size of an action": [part.frames.num_values for part in parts],
    }
    for name, found in metadata.items():
        if len(set(found)) > 1:
            each = {str(part.frames.dataset.path): value for part, value in zip(parts, found, strict=True)}
            raise DatasetError(f"datasets differ in {name}: {each}; mix only datasets of the same robot and frames")


class ClipSource(Protocol):
    """Batches of clips for a step of the dynamics' fit."""

    def batch(self, size: int, step: int) -> tuple[Clip, Frames | None]:
        """Return clips, and what the dynamics is to see of them in place of their own frames; None: just those.

        What a step draws depends on its number, and on the weights at steps that `save_every` divides alone.
        """
        ...


class ClipSourceConfig(Config):
    """Base of the `world_model.clip_source` section."""

    kind: str

    def check(self, save_every: int) -> None:
        """Check that a fit with a checkpoint every so many steps could be resumed exactly.

        Raises:
            ConfigError: it could not.
        """

    def build(
        self, clips: ClipDataset, dynamics: Dynamics, num_steps: int, seed: int, device: torch.device | str
    ) -> ClipSource:
        """Return the source for a stage of `num_steps`."""
        raise NotImplementedError(f"{type(self).__name__} must implement build")
