"""Training data of the value: frames labeled with outcome and time left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from world_model.data.clips import ClipDataset, SuccessBatch, labeled_windows
from world_model.data.episodes import EpisodeFrames, tasks_of
from world_model.metadata import WorldModelMetadata
from world_model.model.success import timed


@dataclass(frozen=True)
class Outcomes:
    """The frames of E episodes up to their success, of each: which, how its episode ended, and the time left.

    Attributes:
        frame: int64 (N,), among the episodes' frames. number: int64 (N,), in its episode. owner: int64 (N,).
        success: bool (N,), the episode succeeded at last. reached: bool (N,), it had succeeded by this frame.
        steps_left: int64 (N,), control steps to the task's horizon.
    """

    frame: np.ndarray
    number: np.ndarray
    owner: np.ndarray
    success: np.ndarray
    reached: np.ndarray
    steps_left: np.ndarray

    @classmethod
    def of(cls, frames: EpisodeFrames, metadata: WorldModelMetadata) -> Outcomes:
        """Those of all episodes; what came after the first frame with success is left out."""
        every = np.arange(frames.num_frames)
        reached = frames.success(every)
        earlier = np.concatenate([[False], reached[:-1]]) & (frames.number > 0)
        kept = every[~earlier]
        owner = frames.owner[kept]
        success = frames.dataset.success[frames.episodes][owner]
        return cls(kept, frames.number[kept], owner, success, reached[kept], steps_left(frames, metadata)[kept])

    @staticmethod
    def concatenate(parts: Sequence[Outcomes]) -> Outcomes:
        """Of several sets of episodes, in order; `frame` and `owner` are still numbered in each."""
        return Outcomes(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Outcomes)})


def steps_left(frames: EpisodeFrames, metadata: WorldModelMetadata) -> np.ndarray:
    """Control steps from each of the M frames to the task's horizon, int64 (M,), at least 0.

    A task that the metadata does not know has the longest task's horizon.
    """
    longest = max(metadata.horizon.values())
    horizon = np.array([metadata.horizon.get(task, longest) for task in tasks_of(frames, metadata.tasks)])
    done = np.minimum(frames.number * frames.frame_steps, frames.steps[frames.owner])
    return np.maximum(horizon[frames.owner] - done, 0)


class ValueSamples:
    """Windows of real frames with the outcome of their episode, drawn uniformly: Monte-Carlo targets.

    Args:
        clips: whose episodes, weights and normalization to take. num_frames: R.
    """

    def __init__(self, clips: ClipDataset, metadata: WorldModelMetadata, num_frames: int) -> None:
        self._clips, self._num_frames, self._longest = clips, num_frames, max(metadata.horizon.values())
        self._parts = [Outcomes.of(part.frames, metadata) for part in clips.parts]
        weights = np.array([part.frames.dataset.weight for part in clips.parts], np.float64)
        self._share = weights / weights.sum()

    def batch(self, size: int, seed: int, step: int) -> SuccessBatch:
        """`size` windows whose states tell the time left (`timed`), the same for the same (seed, step)."""
        rng = np.random.default_rng([seed, step])
        which, place = rng.choice(len(self._parts), size, p=self._share), rng.random(size)
        frame, left, success = np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, bool)
        for i, part in enumerate(self._parts):
            rows = which == i
            drawn = (place[rows] * len(part.frame)).astype(np.int64)
            frame[rows], success[rows] = part.frame[drawn], part.success[drawn]
            left[rows] = part.steps_left[drawn] / self._longest
        batch = labeled_windows(self._clips, which, frame, self._num_frames, success)
        share = torch.from_numpy(left).clamp(0, 1)
        return SuccessBatch(timed(batch.frames, share), timed(batch.reference, share), batch.instruction, batch.success)
