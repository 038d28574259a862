"""A dataset decoded once into flat arrays that are memory-mapped: a batch is then one indexing.

The cache is a folder named by a hash of the dataset's content, the cameras and the image size. It
appears whole (written aside, then renamed), so several runs may share it. An image that repeats the one
before it, as most do where one was drawn per action chunk, is kept once.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vla_rl.common.atomic import atomic_folder, disk_full
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import (
    ACTION,
    CONTROL_SOURCE,
    EXECUTED_ACTION,
    FINAL_IMAGE_PREFIX,
    FINAL_STATE,
    STATE,
    SUCCESS,
)
from vla_rl.data.source import LeRobotSource, check_finite, vectors
from vla_rl.types import CONTROL_SOURCES

FORMAT = 4
ARRAYS = ("state", "action", "executed_action", "source", "task", "succeeded")


@dataclass(frozen=True)
class StoredImages:
    """The images of N frames, indexed by frames as an array of them is; those that repeat are kept once.

    Attributes:
        distinct: memory-mapped uint8 (K, height, width, 3). number: int32 (N,), which of them each frame shows.
    """

    distinct: np.ndarray
    number: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, height, width, 3)."""
        return (len(self.number), *self.distinct.shape[1:])

    def __getitem__(self, frames: int | slice | np.ndarray) -> np.ndarray:
        """uint8 (..., height, width, 3) of one frame, a range of them, or `frames`, int64 (...)."""
        return self.distinct[self.number[frames]]


@dataclass(frozen=True)
class DecodedDataset:
    """What the cache holds of N frames, episode after episode, and of E episodes.

    Attributes:
        folder: of the cache; its name is a hash of the dataset's content, the cameras and the image size.
        images: camera -> those of the N frames.
        arrays: state float32 (N, S), action and executed_action float32 (N, A), source int8 (N,) (index in
            `CONTROL_SOURCES`), task int32 (N,) (index of the instruction), succeeded bool (N,) (as each step
            recorded it; False where none did).
        final_images: camera -> memory-mapped uint8 (E, height, width, 3), after each episode's last action, and
        final_state: float32 (E, S), likewise; None where the dataset does not record them.
    """

    folder: Path
    images: dict[str, StoredImages]
    arrays: dict[str, np.ndarray]
    final_images: dict[str, np.ndarray] | None
    final_state: np.ndarray | None


def cache_path(source: LeRobotSource, cameras: Sequence[str], size: int | None) -> Path:
    """Where the cache of a dataset lives, in `source.cache_home`."""
    key = hashlib.blake2b(
        json.dumps([FORMAT, source.fingerprint(), sorted(cameras), size]).encode(), digest_size=12
    ).hexdigest()
    return source.cache_home / key


def open_cache(source: LeRobotSource, cameras: Sequence[str], size: int | None) -> DecodedDataset:
    """The dataset's arrays, decoded first if they are not cached yet.

    Args:
        cameras: the dataset's names of the cameras to decode.
        size: side of the square images, pixels; None keeps the dataset's own.

    Raises:
        DatasetError: damaged data, or NaN or infinity in actions or states.
        DiskFullError: no room for the cache; the message says how much it needs.
    """
    path = cache_path(source, cameras, size)
    if not path.is_dir():
        _build(source, list(cameras), size, path)

    final = {camera: _image_file(path, camera, final=True) for camera in cameras}
    state = path / f"{FINAL_STATE}.npy"
    return DecodedDataset(
        folder=path,
        images={camera: _stored_images(path, camera) for camera in cameras},
        arrays={name: np.load(path / f"{name}.npy") for name in ARRAYS},
        final_images={camera: np.load(file, mmap_mode="r") for camera, file in final.items()}
        if all(file.exists() for file in final.values())
        else None,
        final_state=np.load(state) if state.exists() else None,
    )


def _build(source: LeRobotSource, cameras: list[str], size: int | None, path: Path) -> None:
    with atomic_folder(path, what="dataset cache") as partial:
        arrays = _read_arrays(source)
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        if (final_states := source.final_states()) is not None:
            np.save(partial / f"{FINAL_STATE}.npy", final_states)
        for camera in cameras:
            file = _image_file(partial, camera)
            number = _write_images(source, camera, source.images(camera, size), source.num_frames, file)
            np.save(_number_file(partial, camera), number)
            if (final_images := source.final_images(camera, size)) is not None:
                file = _image_file(partial, camera, final=True)
                _write_images(source, camera, final_images, len(source.lengths), file)
        (partial / "cache.json").write_text(json.dumps({"dataset": str(source.root), "cameras": cameras, "size": size}))


def _read_arrays(source: LeRobotSource) -> dict[str, np.ndarray]:
    """Everything but the images, checked."""
    columns = ["episode_index", "task_index", ACTION]
    columns += [name for name in (STATE, EXECUTED_ACTION, CONTROL_SOURCE, SUCCESS) if source.has(name)]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*ARRAYS, "episode")}
    for table in source.batches(columns):
        rows = table.num_rows
        try:
            action = vectors(table, ACTION)
            parts["action"].append(action)
            parts["executed_action"].append(vectors(table, EXECUTED_ACTION) if source.has(EXECUTED_ACTION) else action)
            parts["state"].append(vectors(table, STATE) if source.has(STATE) else np.zeros((rows, 0), np.float32))
        except ValueError as error:
            raise DatasetError(f"{source.root}: actions or states of uneven length: {error}") from error
        parts["source"].append(_source_codes(source, table, rows))
        parts["succeeded"].append(vectors(table, SUCCESS)[:, 0] > 0 if source.has(SUCCESS) else np.zeros(rows, bool))
        parts["task"].append(np.asarray(table.column("task_index")).astype(np.int32))
        parts["episode"].append(np.asarray(table.column("episode_index")).astype(np.int64))
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    episode = arrays.pop("episode")
    expected = np.repeat(np.arange(len(source.lengths)), source.lengths)
    if not np.array_equal(episode, expected):
        raise DatasetError(
            f"{source.root}: the data files hold {len(episode)} frames whose episode numbers do not match the "
            f"{len(expected)} frames listed in meta/episodes; the dataset is incomplete. Copy or collect it again."
        )
    for name, column in (("action", ACTION), ("executed_action", EXECUTED_ACTION), ("state", STATE)):
        check_finite(source, column, arrays[name])
    return arrays


def _source_codes(source: LeRobotSource, table: Any, rows: int) -> np.ndarray:
    if not source.has(CONTROL_SOURCE):
        return np.full(rows, CONTROL_SOURCES.index("expert"), np.int8)
    names = table.column(CONTROL_SOURCE).to_pylist()
    if unknown := sorted({str(name) for name in names} - set(CONTROL_SOURCES)):
        raise DatasetError(f"{source.root}: {CONTROL_SOURCE} holds {unknown}; allowed: {', '.join(CONTROL_SOURCES)}")
    return np.asarray([CONTROL_SOURCES.index(name) for name in names], np.int8)


def _write_images(
    source: LeRobotSource, camera: str, images: Iterator[np.ndarray], num_images: int, file: Path
) -> np.ndarray:
    """Stream decoded images into an .npy file, but for repeats of the one before; return which each is, int32.

    Plain writes: a full disk then is an error, not a bus fault.
    """
    numbers: list[np.ndarray] = []
    last: np.ndarray | None = None
    written = 0
    with open(file, "wb") as stream:
        for frames in images:
            if last is None:
                needed = num_images * frames[0].nbytes  # If none repeats.
                if shutil.disk_usage(file.parent).free < needed:
                    raise disk_full(file, f"decoded images of {camera!r} ({needed / 2**20:.0f} MiB needed)")
                _write_header(stream, (num_images, *frames.shape[1:]))
            elif frames.shape[1:] != last.shape:
                raise DatasetError(
                    f"{source.root}: images of {camera!r} differ in size: {last.shape}, {frames.shape[1:]}; set "
                    "image_size"
                )
            is_new = np.append(last is None or (frames[0] != last).any(), (frames[1:] != frames[:-1]).any((1, 2, 3)))
            numbers.append(written - 1 + np.cumsum(is_new))
            stream.write(np.ascontiguousarray(frames[is_new]).data)
            written, last = written + int(is_new.sum()), frames[-1]
        if last is not None:  # The header leaves room for the first axis to change.
            stream.seek(0)
            _write_header(stream, (written, *last.shape))
    number = np.concatenate(numbers).astype(np.int32) if numbers else np.zeros(0, np.int32)
    if len(number) != num_images:
        raise DatasetError(f"{source.root}: {camera!r} has {len(number)} images for {num_images} frames")
    return number


def _write_header(stream: BinaryIO, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _stored_images(folder: Path, camera: str) -> StoredImages:
    return StoredImages(np.load(_image_file(folder, camera), mmap_mode="r"), np.load(_number_file(folder, camera)))


def _image_file(folder: Path, camera: str, final: bool = False) -> Path:
    return folder / f"{FINAL_IMAGE_PREFIX if final else 'image_'}{camera}.npy"


def _number_file(folder: Path, camera: str) -> Path:
    return folder / f"number_{camera}.npy"
