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

import numpy as np

from vla_rl.common.task_names import libero_instruction
from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import hdf5_files, numbers, open_hdf5, pictures
from vla_rl.data.importing import demonstration, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode

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
