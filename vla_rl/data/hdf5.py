"""HDF5 files of others, read carefully: what they are, arrays of a known shape and a bounded size, no objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.importing import MAX_SIDE
from vla_rl.data.lerobot_io import encode_png

MAX_STEPS, MAX_NUMBERS = 100_000, 1_024  # of an episode, of a step
MAX_JPEG_BYTES = 2**25  # of one picture
MAX_CAMERA_BYTES = 2**34  # of a camera in an episode, before compression


class Layout(StrEnum):
    """What wrote a file."""

    libero = "libero"
    aloha = "aloha"
    robomimic = "robomimic"


@contextmanager
def open_hdf5(file: Path) -> Iterator[Any]:
    """An `h5py.File` to read; what is damaged in it is a `DatasetError` that names the file."""
    try:
        with h5py.File(file, "r") as opened:
            yield opened
    except DatasetError:
        raise
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DatasetError(
            f"{file}: no HDF5, or a damaged file ({str(error)[:200]}). Copy it again, or leave it out"
        ) from error


def layout_of(file: Path) -> Layout:
    """Return what wrote a file, by what it holds.

    Raises:
        DatasetError: neither of those known, or damaged.
    """
    with open_hdf5(file) as opened:
        if "observations" in opened and "action" in opened:
            return Layout.aloha
        if "data" in opened:
            return Layout.libero if "problem_info" in opened["data"].attrs else Layout.robomimic
        held = ", ".join(sorted(opened)) or "nothing"
        raise DatasetError(
            f"{file}: holds {held}; known are ALOHA's files (observations/qpos, observations/images, action) and "
            "robomimic's and LIBERO's (data/demo_N/actions, data/demo_N/obs)"
        )


def hdf5_files(sources: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named, in order.

    Raises:
        ConfigError: there is none, or one is named twice.
    """
    files = [
        file
        for source in sources
        for file in (sorted(f for f in source.iterdir() if is_hdf5(f)) if source.is_dir() else [source])
    ]
    if not files:
        raise ConfigError("import: name at least one HDF5 file")
    times = Counter(file.resolve() for file in files)
    if twice := [str(file) for file in files if times[file.resolve()] > 1]:
        raise ConfigError(f"import: one file is named more than once: {', '.join(twice)}. Name it once")
    return files


def is_hdf5(file: Path) -> bool:
    """Whether a file's name says that it is HDF5."""
    return file.suffix in (".hdf5", ".h5")


def numbers(group: Any, name: str, where: str, length: int | None = None) -> np.ndarray:
    """An array of numbers, float32 (T, D), finite.

    Args:
        where: for errors. length: T that it must have.

    Raises:
        DatasetError: missing, of another shape, too large, or not finite.
    """
    found = _dataset(group, name, where)
    if found.ndim not in (1, 2) or found.dtype.kind not in "fiub":
        raise DatasetError(f"{where}/{name}: is {found.dtype} {found.shape}, expected numbers (T, D)")
    steps, size = found.shape[0], found.shape[1] if found.ndim == 2 else 1
    if not (1 <= steps <= MAX_STEPS and 1 <= size <= MAX_NUMBERS):
        raise DatasetError(
            f"{where}/{name}: has shape {found.shape}; an episode has 1 to {MAX_STEPS} steps of 1 to {MAX_NUMBERS} "
            "numbers"
        )
    if length is not None and steps != length:
        raise DatasetError(f"{where}/{name}: has {steps} rows, its actions {length}; each row is one control step")
    values = np.asarray(found[()], np.float32).reshape(steps, size)
    if len(bad := np.flatnonzero(~np.isfinite(values).all(1))):
        raise DatasetError(f"{where}/{name}: row {bad[0]} holds NaN or an infinite number; leave this episode out")
    return values


def pictures(
    group: Any, name: str, where: str, length: int, turned: Callable[[np.ndarray], np.ndarray] = lambda image: image
) -> list[bytes]:
    """A camera's T pictures as PNG, or as JPEG where they are stored so, without the zeros that pad them.

    Args:
        where: for errors. length: T. turned: makes an upright picture of one that is not JPEG.

    Raises:
        DatasetError: missing, of another shape, too large, or not as many as actions.
    """
    found = _dataset(group, name, where)
    if found.shape[:1] != (length,):
        raise DatasetError(
            f"{where}/{name}: has shape {found.shape}, its actions {length} rows; each needs its picture"
        )
    if found.size > MAX_CAMERA_BYTES:
        raise DatasetError(
            f"{where}/{name}: has shape {found.shape}, over {MAX_CAMERA_BYTES >> 30} GiB; cut the episode"
        )
    if found.ndim == 4 and found.dtype == np.uint8 and found.shape[3] == 3:
        if max(found.shape[1:3]) > MAX_SIDE:
            raise DatasetError(f"{where}/{name}: pictures of {found.shape[1:3]} pixels; at most {MAX_SIDE} a side")
        return [encode_png(turned(found[step])) for step in range(length)]
    is_list = found.ndim == 1 and (found.dtype.metadata or {}).get("vlen") == np.uint8
    if not (is_list or (found.ndim == 2 and found.dtype == np.uint8 and found.shape[1] <= MAX_JPEG_BYTES)):
        raise DatasetError(
            f"{where}/{name}: is {found.dtype} {found.shape}, expected uint8 (T, height, width, 3), or JPEG as uint8 "
            "(T, padded bytes)"
        )
    found_all = []
    for step in range(length):
        data = bytes(found[step]).rstrip(b"\0")
        if not (data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9")):
            raise DatasetError(f"{where}/{name}: picture {step}: {len(data)} bytes that are no whole JPEG")
        found_all.append(data)
    return found_all


def _dataset(group: Any, name: str, where: str) -> Any:
    """An array of this file's own; what it would take from other files is refused."""
    if name not in group or not hasattr(group[name], "dtype"):
        there = ", ".join(sorted(group)) if hasattr(group, "keys") else "nothing"
        raise DatasetError(f"{where}/{name}: missing; there are {there or 'none'}")
    found = group[name]
    if found.file.filename != group.file.filename or found.external or found.is_virtual:
        raise DatasetError(f"{where}/{name}: lies in another file; copy its numbers into this one (h5repack)")
    return found
