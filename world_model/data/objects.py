"""Recorded object poses: training data and ground truth of the objects part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vla_rl.data.config import DatasetError
from vla_rl.data.objects import open_object_poses
from world_model.config import ObjectsConfig, ObjectsStageConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames
from world_model.model.objects import ObjectBatch, mirrored, off_by
from world_model.types import Actions

POSITION_NOISE, YAW_NOISE = 0.002, 0.06  # Of the poses that episodes are rolled from, as the probe errs; m, rad.
LONG = 0.6  # Of the longest episode: longer ones make batches of their own, so that little is padded.


def slot_poses(frames: EpisodeFrames, slots: Sequence[Sequence[str]]) -> np.ndarray | None:
    """The poses that a dataset recorded, by slot: before each of its N actions, then after the last of its E episodes.

    Returns:
        float32 (N + E, M, 4), as `EpisodeFrames.place` numbers them; None where it recorded none.

    Raises:
        DatasetError: a slot has none of its objects in an episode.
    """
    found = open_object_poses(frames.dataset.path)
    if found is None:
        return None
    names, poses, final = found
    starts, lengths = frames.dataset.starts, frames.dataset.lengths
    owner = np.concatenate([np.repeat(np.arange(len(starts)), lengths), np.arange(len(starts))])
    every = np.concatenate([poses, final])
    columns = []
    for number, slot in enumerate(slots):
        choice = np.full(len(starts), -1)
        for name in reversed([name for name in slot if name in names]):
            column = names.index(name)
            choice[np.isfinite(poses[starts, column]).all(1)] = column
        if (missing := np.flatnonzero(choice < 0)).size:
            known = [name for column, name in enumerate(names) if np.isfinite(poses[starts[missing[0]], column]).all()]
            raise DatasetError(
                f"{frames.dataset.path}: episode {missing[0]} has none of {', '.join(slot)}, the objects of slot "
                f"{number} (world_model.objects.network.slots); it has: {', '.join(known) or 'none'}"
            )
        columns.append(every[np.arange(len(every)), choice[owner]])
    return np.stack(columns, 1)


def poses_for(config: ObjectsConfig | None, frames: EpisodeFrames) -> np.ndarray | None:
    """`slot_poses` of an objects part; None where there is no such part."""
    return None if config is None else slot_poses(frames, config.slots)


@dataclass(frozen=True)
class _Part:
    """Episodes of one dataset: all arrays by row of the dataset, with the final observations after them."""

    number: int
    frames: EpisodeFrames
    poses: np.ndarray

    def path(self, rows: np.ndarray, happened: np.ndarray) -> np.ndarray:
        """Where the end effector was after each step, float32 (E, length, 3), meters; NaN past an episode's end, and
        where the recording repeats an older state (`observed_every`). Arguments as `rows` returns them."""
        dataset, after = self.frames.dataset, rows[:, 1:]
        known = ((after - rows[:, :1]) % dataset.observed_every == 0) | (after >= len(dataset.actions))
        return np.where((known & happened)[..., None], self.frames.states_at(after)[..., :3], np.float32(np.nan))

    def rows(self, episode: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the poses 0 .. length of each of the E selected `episode`, and whether step 1 .. length happened."""
        number = self.frames.episodes[episode]
        start, steps = self.frames.dataset.starts[number], self.frames.steps[episode]
        step = np.arange(length + 1)
        rows = start[:, None] + np.minimum(step, steps[:, None])
        is_final = (step >= steps[:, None]) & (steps == self.frames.dataset.lengths[number])[:, None]
        rows = np.where(is_final, len(self.frames.dataset.actions) + number[:, None], rows)
        return rows, step[1:] <= steps[:, None]


class ObjectSamples:
    """Batches for the objects part. What a step draws depends on (seed, step) alone.

    Args:
        clips: whose episodes, latents and weights to take; datasets without poses are left out.

    Raises:
        DatasetError: no dataset holds poses, or a slot has none of its objects in an episode.
    """

    def __init__(self, clips: ClipDataset, slots: Sequence[Sequence[str]], config: ObjectsStageConfig) -> None:
        self._clips, self._config = clips, config
        found = [(i, part.frames, slot_poses(part.frames, slots)) for i, part in enumerate(clips.parts)]
        self._parts = [_Part(number, frames, poses) for number, frames, poses in found if poses is not None]
        if not self._parts:
            raise DatasetError(
                f"{', '.join(str(part.frames.dataset.path) for part in clips.parts)}: no objects' poses; the objects "
                "part learns from episodes collected with collect.objects=true. Collect such, or set "
                "world_model.objects.steps=0"
            )
        weights = np.array([part.frames.dataset.weight for part in self._parts], np.float64)
        self._share = weights / weights.sum()
        longest = max(int(part.frames.steps.max()) for part in self._parts)
        self._is_long = [part.frames.steps > LONG * longest for part in self._parts]

    def all_poses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Poses at episodes' first frames, float32 (E, M, 4), and positions of all frames, float32 (N, 3)."""
        first = [part.poses[part.frames.place[part.frames.starts]] for part in self._parts]
        positions = [part.frames.states(np.arange(part.frames.num_frames))[:, :3] for part in self._parts]
        return torch.from_numpy(np.concatenate(first)), torch.from_numpy(np.concatenate(positions))

    def batch(self, size: int, seed: int, step: int) -> ObjectBatch:
        """`size` episodes of about one length, and half as many single frames, half of these first ones."""
        rng = np.random.default_rng([seed, step])
        which = int(rng.choice(len(self._parts), p=self._share))
        part, is_long = self._parts[which], self._is_long[which]
        pool = np.flatnonzero(is_long == (rng.random() < is_long.mean()))
        episode = pool[rng.integers(len(pool), size=size)]
        length = int(part.frames.steps[episode].max())
        rows, executed = part.rows(episode, length)
        dataset, step_rows = part.frames.dataset, np.minimum(rows[:, :-1], len(part.frames.dataset.actions) - 1)
        values = np.clip(dataset.executed_actions[step_rows], part.frames.low, part.frames.high) * executed[..., None]
        poses = torch.from_numpy(part.poses[rows])
        place, said = self._single_frames(part, size // 2, rng)
        latents = self._clips.frames(np.full(len(place), part.number), place[:, None]).latents[:, 0]
        torch.manual_seed(int(rng.integers(2**31)))
        batch = ObjectBatch(
            poses=poses,
            start=off_by(poses[:, 0], POSITION_NOISE, YAW_NOISE),
            position=torch.from_numpy(part.frames.states(part.frames.starts[episode])[:, :3].copy()),
            actions=Actions(torch.from_numpy(values)[:, None], torch.from_numpy(executed)[:, None]),
            success=torch.from_numpy(dataset.succeeded[step_rows] & executed),
            instruction=part.frames.instruction(part.frames.starts[episode]),
            latents=latents + 0.15 * torch.rand(len(latents), 1, 1, 1, 1) * torch.randn_like(latents),
            seen=torch.from_numpy(part.poses[part.frames.place[place]]),
            is_first=torch.from_numpy(part.frames.number[place] == 0),
            said=said,
            path=torch.from_numpy(part.path(rows, executed)),
        )
        return mirrored(batch, torch.rand(size) < 0.5) if self._config.mirror else batch

    def _single_frames(self, part: _Part, size: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
        every = rng.integers(part.frames.num_frames, size=size)
        first = part.frames.starts[rng.integers(len(part.frames.starts), size=size)]
        place = np.where(np.arange(size) % 2 == 0, first, every)
        return place, part.frames.instruction(place)
