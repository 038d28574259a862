"""HDF5 files of others, read carefully: arrays of a known shape and a bounded size; LIBERO's demonstrations.

LIBERO's published demonstrations, one HDF5 file a task, as a LeRobotDataset such as `vla-rl collect` would write.

    vla-rl import libero_spatial/*.hdf5 -o datasets/libero_spatial

Four things are put right on the way. LIBERO's script stores what was seen *after* each action in that action's row,
so that a policy cloned row by row learns the action before: here each action stands beside what was seen before it.
Pictures are turned to OpenVLA's protocol (docs/libero.md). Steps in which nothing is commanded are left out, as
OpenVLA does. The instruction is the benchmark's: the files' own text words some tasks otherwise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vla_rl.common.tables import libero_instruction
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.importing import MAX_SIDE, demonstration, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode, encode_png

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


CAMERAS = {"agentview": "agentview_rgb", "wrist": "eye_in_hand_rgb"}
STATE = {"ee_states": 6, "gripper_states": 2}  # in this order: position, axis-angle; the fingers
ACTION_DIM, CONTROL_HZ = 7, 20
STILL = 1e-4  # an arm's action below this, with the gripper as before, commands nothing


def import_libero(
    files: Sequence[Path], dataset: Path, keep_pauses: bool = False, report: Callable[[str], None] = print
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each demonstration; it appears whole.

    Args:
        files: `TASK_demo.hdf5`, of one picture size.
        dataset: folder to make; must not exist.
        keep_pauses: keep the steps in which nothing is commanded.
        report: told what each file gave.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: a file that is not such a one, or is damaged; the message names the part.
        ConfigError: no files.
    """
    files = hdf5_files(files)

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        for file in files:
            demos, pauses = 0, 0
            for episode, num_pauses in read_demos(file, keep_pauses):
                yield str(file), episode
                demos, pauses = demos + 1, pauses + num_pauses
            report(f"{file.name}: {demos} demonstrations" + (f", {pauses} steps left out" if pauses else ""))

    notes = {"source": "LIBERO's HDF5", "files": [file.name for file in files], "keep_pauses": keep_pauses}
    return write_episodes(episodes(), dataset, fps=CONTROL_HZ, robot="libero", notes=notes)


def read_demos(file: Path, keep_pauses: bool = False) -> list[tuple[RecordedEpisode, int]]:
    """Read the demonstrations of one file, in their numbers' order, each with how many of its steps were left out.

    Raises:
        DatasetError: not LIBERO's layout, or damaged.
    """
    with open_hdf5(file) as opened:
        data: Any = opened["data"]
        instruction = _instruction(file, json.loads(data.attrs["problem_info"])["language_instruction"])
        turned = _turn(file, str(data.attrs.get("macros_image_convention", "opengl")))
        names = sorted(data, key=lambda name: int(name.removeprefix("demo_")))
        return [_read(data[name], file, int(name[5:]), instruction, turned, keep_pauses) for name in names]


def _instruction(file: Path, said: str | list[str]) -> str:
    """As the benchmark words the task that a file is named after, or else as the file says it."""
    task = file.name.removesuffix("_demo.hdf5")
    return libero_instruction(task) if task != file.name else " ".join([said] if isinstance(said, str) else said)


def _turn(file: Path, convention: str) -> Callable[[np.ndarray], np.ndarray]:
    """To our pictures (upright, mirrored) from robosuite's two ways of storing them."""
    turns: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "opengl": lambda image: image[::-1, ::-1],
        "opencv": lambda image: image[:, ::-1],
    }
    if convention not in turns:
        raise DatasetError(f"{file}: macros_image_convention is {convention!r}, known: {', '.join(turns)}")
    return turns[convention]


def _read(
    group: Mapping[str, Any],
    file: Path,
    index: int,
    instruction: str,
    turned: Callable[[np.ndarray], np.ndarray],
    keep_pauses: bool,
) -> tuple[RecordedEpisode, int]:
    where, obs = f"{file}: demo_{index}", group["obs"]
    actions = numbers(group, "actions", where)
    length = len(actions)
    state = np.concatenate([numbers(obs, name, f"{where}/obs", length) for name in STATE], axis=1)
    if actions.shape[1] != ACTION_DIM or state.shape[1] != sum(STATE.values()) or length < 2:
        raise DatasetError(
            f"{where}/actions has shape {actions.shape}, its state {state.shape[1]} numbers; expected "
            f"(2 or more, {ACTION_DIM}), and {sum(STATE.values())}"
        )
    png = {camera: pictures(obs, name, f"{where}/obs", length, turned) for camera, name in CAMERAS.items()}
    kept = [step for step in range(1, length) if keep_pauses or not _commands_nothing(actions, step)]
    if not kept:
        raise DatasetError(f"{where} commands nothing at any step")
    success = bool(np.asarray(group["rewards"]).max() > 0) if "rewards" in group else True
    episode = demonstration(
        instruction,
        index,
        {camera: [seen[step - 1] for step in kept] for camera, seen in png.items()},
        state[[step - 1 for step in kept]],
        actions[kept],
        task=file.name.removesuffix(".hdf5").removesuffix("_demo"),
        success=success,
        final_png={camera: seen[-1] for camera, seen in png.items()},
        final_state=state[-1],
    )
    return episode, length - 1 - len(kept)


def _commands_nothing(actions: np.ndarray, step: int) -> bool:
    return bool(np.linalg.norm(actions[step, :-1]) < STILL and actions[step, -1] == actions[step - 1, -1])
