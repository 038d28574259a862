"""The segmentation and depth of a dataset's images, decoded once from its files and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.common.atomic import atomic_folder, disk_full
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.data.segmentation import FOLDER, structure_file
from vla_rl.data.source import add_file

MAX_SIDE = 4096  # pixels
_FORMAT = 1
_HELP = "Collect with collect.structure=true, or write the file with a segmentation model (docs/style_robust.md)."


@dataclass(frozen=True)
class Structure:
    """The structure of a dataset's N frames and, after them, of its E final images, memory-mapped.

    Attributes:
        segments: camera -> uint8 (N + E, height, width), of the images' size.
        depth: camera -> uint16 (N + E, height, width), millimeters; None where it was not asked for.
        key: of the content.
    """

    segments: dict[str, np.ndarray]
    depth: dict[str, np.ndarray] | None
    key: str


def open_structure(dataset: EpisodeDataset, camera_map: Mapping[str, str], depth: bool = False) -> Structure:
    """The structure that belongs to a dataset's images, checked and decoded (once) beside them.

    Args:
        camera_map: the dataset's camera name -> that of `dataset.images`, where they differ.
        depth: read the depth as well.

    Raises:
        DatasetError: a file is missing or damaged, lacks a camera or the depth, or does not belong to the images.
        DiskFullError: no room for the decoded arrays.
    """
    stored = {camera: name for name, camera in camera_map.items()}
    cameras = {camera: stored.get(camera, camera) for camera in dataset.images}
    files = [structure_file(dataset.path, number) for number in range(len(dataset.lengths))]
    for file in files:
        if not file.is_file():
            raise DatasetError(f"{file}: missing; a change of style is guided by segmentation. {_HELP}")
    key = hashlib.blake2b(
        json.dumps([_FORMAT, dataset.cache.name, sorted(cameras.items()), depth, _fingerprint(files)]).encode(),
        digest_size=12,
    ).hexdigest()
    folder = dataset.cache.parent / f"{FOLDER}_{key}"
    kinds = {"segments": np.dtype(np.uint8)} | ({"depth": np.dtype(np.uint16)} if depth else {})
    if not folder.is_dir():
        with atomic_folder(folder, what="decoded structure") as partial:
            for kind, dtype in kinds.items():
                for camera, name in cameras.items():
                    _, height, width, _ = dataset.images[camera].shape
                    rows = _rows(dataset, files, f"{kind}_{name}", dtype, (height, width))
                    shape = (len(dataset.actions) + len(files), height, width)
                    _write(partial / f"{kind}_{camera}.npy", rows, shape, dtype)
    maps = {
        kind: {camera: np.load(folder / f"{kind}_{camera}.npy", mmap_mode="r") for camera in cameras} for kind in kinds
    }
    return Structure(maps["segments"], maps.get("depth"), key)


def _rows(
    dataset: EpisodeDataset, files: Sequence[Path], name: str, dtype: np.dtype, size: tuple[int, int]
) -> Iterator[np.ndarray]:
    """The maps of all episodes' frames, episode by episode, then those of all final images in one."""
    has_end = dataset.final_images is not None
    final = np.zeros((len(files), *size), dtype)
    for number, (file, length) in enumerate(zip(files, dataset.lengths.tolist(), strict=True)):
        maps = _fitted(_read(file, name, dtype, length, has_end), size, file)
        final[number] = maps[-1]
        yield maps[:length]
    yield final


def _read(file: Path, name: str, dtype: np.dtype, length: int, has_end: bool) -> np.ndarray:
    """One array of an episode's file; its size is checked before it is read."""
    allowed = (length + 1,) if has_end else (length, length + 1)
    try:
        with zipfile.ZipFile(file) as archive:
            if f"{name}.npy" not in (names := archive.namelist()):
                found = ", ".join(sorted(n.removesuffix(".npy") for n in names)) or "nothing"
                raise DatasetError(f"{file}: has no {name!r}; it holds {found}. {_HELP}")
            with archive.open(f"{name}.npy") as stream:
                version = np.lib.format.read_magic(stream)
                read_header = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, fortran, found_dtype = read_header(stream)
                fits = len(shape) == 3 and shape[0] in allowed and min(shape) > 0 and max(shape[1:]) <= MAX_SIDE
                if not fits or fortran or found_dtype != dtype:
                    rows = " or ".join(map(str, allowed))
                    raise DatasetError(
                        f"{file}: {name} is {found_dtype} {shape}; the episode has {length} control steps, so it must "
                        f"be {dtype} ({rows}, height, width), in C order, at most {MAX_SIDE} pixels a side"
                    )
                data = stream.read(int(np.prod(shape)) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DatasetError(f"{file}: damaged ({type(error).__name__}: {error}). {_HELP}") from error
    except ValueError as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{file}: {name} is not an .npy array ({error}). {_HELP}") from error


def _fitted(maps: np.ndarray, size: tuple[int, int], file: Path) -> np.ndarray:
    """Maps at the images' size, nearest pixel for pixel."""
    height, width = maps.shape[1:]
    if (height, width) == size:
        return maps
    if height * size[1] != width * size[0]:
        raise DatasetError(f"{file}: maps of {height} x {width} for images of {size[0]} x {size[1]}: another shape")
    rows = (np.arange(size[0]) * height + height // 2) // size[0]
    columns = (np.arange(size[1]) * width + width // 2) // size[1]
    return maps[:, np.minimum(rows, height - 1)][:, :, np.minimum(columns, width - 1)]


def _write(file: Path, parts: Iterator[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Stream arrays into an .npy file. Plain writes: a full disk then is an error, not a bus fault."""
    needed = int(np.prod(shape)) * dtype.itemsize
    if shutil.disk_usage(file.parent).free < needed:
        raise disk_full(file, f"decoded structure ({needed / 2**20:.0f} MiB needed)")
    with open(file, "wb") as stream:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(np.ascontiguousarray(part).data)


def _fingerprint(files: Sequence[Path]) -> str:
    """A hash of each file's size, beginning and end."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        add_file(digest, file.name, file)
    return digest.hexdigest()
