"""A dataset's numbers and small pictures in memory, to look for what is wrong with it and to draw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import observed_every
from vla_rl.data.lerobot_io import ACTION, STATE
from vla_rl.data.source import LeRobotSource

THUMBNAIL = 16  # pixels


@dataclass(frozen=True)
class Recorded:
    """A dataset's numbers and small pictures, N frames of E episodes.

    Attributes:
        state: float32 (N, S). actions: float32 (N, A). time: float64 (N,), seconds. starts, lengths: int64 (E,).
        instruction: E texts.
        looked_at: int64 (K,), numbers of the episodes whose pictures were decoded, ascending.
        first, last: float32 (K, P), their first and last frames, all cameras, small, in [0, 1].
        brightness: float32 (N, cameras, 3), mean color in [0, 1], NaN of others. still: bool (N, cameras): as the
            picture before.
        observed_every: control steps from one picture to the next. name, action_names, grippers: the dataset's own.
    """

    path: Path
    fps: float
    cameras: tuple[str, ...]
    state: np.ndarray
    actions: np.ndarray
    time: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    instruction: list[str]
    looked_at: np.ndarray
    first: np.ndarray
    last: np.ndarray
    brightness: np.ndarray
    still: np.ndarray
    observed_every: int
    name: str = ""
    action_names: tuple[str, ...] = ()
    grippers: tuple[int, ...] = ()

    def episodes(self) -> list[slice]:
        """The frames of each episode."""
        return [slice(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]


def read(
    path: Path,
    watch: Callable[[str, np.ndarray, np.ndarray], None] = lambda *_: None,
    look_at: Callable[[np.ndarray], np.ndarray] = lambda lengths: np.arange(len(lengths)),
) -> Recorded:
    """Read a LeRobotDataset v3; decodes a picture at most once.

    Args:
        watch: shown them: a camera, their rows (n,), and uint8 (n, height, width, 3).
        look_at: the episodes' lengths -> the numbers of those whose pictures are decoded, ascending.

    Raises:
        DatasetError: missing, of another format, or damaged.
    """
    source = LeRobotSource(path)
    columns = [ACTION, "task_index", "timestamp", *([STATE] if source.state_dim else [])]
    columns_of: dict[str, list[np.ndarray]] = defaultdict(list)
    for table in source.batches(columns):
        for name in columns:
            columns_of[name].append(np.asarray(table.column(name).to_pylist(), np.float64))
    values = {name: np.concatenate(arrays) for name, arrays in columns_of.items()}
    num_frames = source.num_frames
    if len(values[ACTION]) != num_frames:
        raise DatasetError(f"{path}: {len(values[ACTION])} frames, its episodes say {num_frames}; copy it again")
    starts = np.cumsum(source.lengths) - source.lengths
    ends = starts + source.lengths - 1
    brightness = np.full((num_frames, len(source.cameras), 3), np.nan, np.float32)
    still = np.zeros((num_frames, len(source.cameras)), bool)
    looked_at = look_at(source.lengths)
    rows = np.concatenate([np.arange(starts[number], ends[number] + 1) for number in looked_at])
    first, last = [], []
    for number, camera in enumerate(source.cameras):
        parts: list[np.ndarray] = []
        for images in source.images(camera, None, looked_at):
            done = sum(map(len, parts))
            watch(camera, rows[done : done + len(images)], images)
            parts.append(_small(images))
        small = np.concatenate(parts)
        brightness[rows, number] = small.mean((1, 2))
        still[rows[1:], number] = (small[1:] == small[:-1]).all((1, 2, 3))
        first.append(small[np.isin(rows, starts)].reshape(len(looked_at), -1))
        last.append(small[np.isin(rows, ends)].reshape(len(looked_at), -1))
    still[starts] = False
    flat = values[ACTION].reshape(num_frames, -1).astype(np.float32)
    state = values[STATE].reshape(num_frames, -1) if source.state_dim else np.zeros((num_frames, 0))
    tasks = values["task_index"].astype(int)[starts]
    return Recorded(
        path=source.root,
        name=source.name,
        fps=source.fps,
        cameras=tuple(source.cameras),
        state=state.astype(np.float32),
        actions=flat,
        time=values["timestamp"].reshape(-1),
        starts=starts,
        lengths=source.lengths,
        instruction=[source.instructions[task] for task in tasks],
        looked_at=looked_at,
        first=np.concatenate(first, 1) if first else np.zeros((len(looked_at), 0), np.float32),
        last=np.concatenate(last, 1) if last else np.zeros((len(looked_at), 0), np.float32),
        brightness=brightness,
        still=still,
        observed_every=observed_every(source.root),
        action_names=source.action_names,
        grippers=source.grippers,
    )


def _small(images: np.ndarray) -> np.ndarray:
    """uint8 (n, height, width, 3) as float32 (n, THUMBNAIL, THUMBNAIL, 3) in [0, 1], averaged over areas."""
    small = [cv2.resize(image, (THUMBNAIL, THUMBNAIL), interpolation=cv2.INTER_AREA) for image in images]
    return np.stack(small).astype(np.float32) / 255
