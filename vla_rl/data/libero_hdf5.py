"""LIBERO's published demonstrations, one HDF5 file a task, as a LeRobotDataset such as `vla-rl collect` would write.

    vla-rl import libero_spatial/*.hdf5 -o datasets/libero_spatial

Four things are put right on the way. LIBERO's script stores what was seen *after* each action in that action's row,
so that a policy cloned row by row learns the action before: here each action stands beside what was seen before it.
Pictures are turned to OpenVLA's protocol (docs/libero.md). Steps in which nothing is commanded are left out, as
OpenVLA does. The instruction is the benchmark's: the files' own text words some tasks otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vla_rl.common.task_names import libero_instruction
from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import hdf5_files
from vla_rl.data.importing import demonstration, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode, encode_png

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
    try:
        with h5py.File(file, "r") as opened:
            data: Any = opened["data"]
            instruction = _instruction(file, json.loads(data.attrs["problem_info"])["language_instruction"])
            turned = _turn(file, str(data.attrs.get("macros_image_convention", "opengl")))
            names = sorted(data, key=lambda name: int(name.removeprefix("demo_")))
            return [_read(data[name], file, int(name[5:]), instruction, turned, keep_pauses) for name in names]
    except (OSError, KeyError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{file}: not a file of LIBERO's demonstrations, or a damaged one ({str(error)[:200]}). Expected: "
            f"data/demo_N/actions (T, {ACTION_DIM}), data/demo_N/obs/{{{', '.join([*STATE, *CAMERAS.values()])}}}, "
            "and the attribute problem_info"
        ) from error


def _instruction(file: Path, said: str | list[str]) -> str:
    """As the benchmark words the task that a file is named after, or else as the file says it."""
    task = file.name.removesuffix("_demo.hdf5")
    return libero_instruction(task) if task != file.name else " ".join([said] if isinstance(said, str) else said)


def _turn(file: Path, convention: str) -> Callable[[np.ndarray], np.ndarray]:
    """To our pictures (upright, mirrored) from robosuite's two ways of storing them."""
    turns: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "opengl": lambda images: images[:, ::-1, ::-1],
        "opencv": lambda images: images[:, :, ::-1],
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
    actions = np.asarray(group["actions"], np.float32)
    length = len(actions)
    if actions.ndim != 2 or actions.shape[1] != ACTION_DIM or length < 2:
        raise DatasetError(
            f"{file}: demo_{index}/actions has shape {actions.shape}, expected (2 or more, {ACTION_DIM})"
        )
    parts = [np.asarray(group[f"obs/{name}"], np.float32) for name in STATE]
    images = {camera: turned(_pictures(group, file, index, name)) for camera, name in CAMERAS.items()}
    for name, values in (
        *zip(STATE, parts, strict=True),
        *((CAMERAS[camera], seen) for camera, seen in images.items()),
    ):
        if len(values) != length:
            raise DatasetError(f"{file}: demo_{index}/obs/{name} has {len(values)} rows, its actions {length}")
    state = np.concatenate(parts, axis=1)
    if state.shape[1] != sum(STATE.values()) or not (np.isfinite(state).all() and np.isfinite(actions).all()):
        raise DatasetError(f"{file}: demo_{index}: states of {state.shape[1]} numbers, or numbers that are not finite")
    kept = [step for step in range(1, length) if keep_pauses or not _commands_nothing(actions, step)]
    if not kept:
        raise DatasetError(f"{file}: demo_{index} commands nothing at any step")
    success = bool(np.asarray(group["rewards"]).max() > 0) if "rewards" in group else True
    episode = demonstration(
        instruction,
        index,
        {camera: [encode_png(seen[step - 1]) for step in kept] for camera, seen in images.items()},
        state[[step - 1 for step in kept]],
        actions[kept],
        task=file.name.removesuffix(".hdf5").removesuffix("_demo"),
        success=success,
        final_png={camera: encode_png(seen[-1]) for camera, seen in images.items()},
        final_state=state[-1],
    )
    return episode, length - 1 - len(kept)


def _pictures(group: Mapping[str, Any], file: Path, index: int, name: str) -> np.ndarray:
    """uint8 (T, height, width, 3)."""
    images = np.asarray(group[f"obs/{name}"])
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise DatasetError(
            f"{file}: demo_{index}/obs/{name} is {images.dtype} {images.shape}, expected uint8 (T, height, width, 3)"
        )
    return images


def _commands_nothing(actions: np.ndarray, step: int) -> bool:
    return bool(np.linalg.norm(actions[step, :-1]) < STILL and actions[step, -1] == actions[step - 1, -1])
