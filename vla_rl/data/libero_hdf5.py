"""LIBERO's published demonstrations, one HDF5 file a task, as a LeRobotDataset such as `vla-rl collect` would write.

    vla-rl import-libero libero_spatial/*.hdf5 -o datasets/libero_spatial

Three things are put right on the way. LIBERO's script stores what was seen *after* each action in that action's row,
so that a policy cloned row by row learns the action before: here each action stands beside what was seen before it.
Pictures are turned to OpenVLA's protocol (docs/libero.md). Steps in which nothing is commanded are left out, as
OpenVLA does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, encode_png, write_shard

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
        ConfigError: no files, or h5py is not installed.
    """
    if not files:
        raise ConfigError("import-libero: name at least one HDF5 file")
    if dataset.exists():
        raise DatasetError(f"{dataset} exists already; choose another folder")
    with tempfile.TemporaryDirectory(prefix="vla-rl-hdf5-") as staging:
        features: dict[str, dict[str, Any]] = {}
        size, number = None, 0
        for file in files:
            demos, pauses = 0, 0
            for demo in read_demos(file, keep_pauses):
                size = size or demo.image_size
                if demo.image_size != size:
                    raise DatasetError(f"{file}: pictures of {demo.image_size}, before {size}; import them apart")
                features = features or dataset_features(tuple(CAMERAS), size, sum(STATE.values()), ACTION_DIM)
                write_shard(Path(staging) / f"shard_{number:05d}", [demo.episode], [], features)
                number, demos, pauses = number + 1, demos + 1, pauses + demo.num_pauses
            report(f"{file.name}: {demos} demonstrations" + (f", {pauses} steps left out" if pauses else ""))
        notes = {"source": "LIBERO's HDF5", "files": [file.name for file in files], "keep_pauses": keep_pauses}
        return assemble(Path(staging), dataset, fps=CONTROL_HZ, features=features, robot="libero", notes=notes)


@dataclass(frozen=True)
class Demo:
    """A demonstration; `image_size` is (height, width), `num_pauses` counts the steps left out."""

    episode: RecordedEpisode
    image_size: tuple[int, int]
    num_pauses: int


def read_demos(file: Path, keep_pauses: bool = False) -> list[Demo]:
    """Read the demonstrations of one file, in their numbers' order.

    Raises:
        DatasetError: not LIBERO's layout, or damaged. ConfigError: h5py is not installed.
    """
    try:
        import h5py
    except ModuleNotFoundError:
        raise ConfigError("import-libero: h5py is not installed. Run: pip install 'vla-rl[libero]'") from None
    try:
        with h5py.File(file, "r") as opened:
            data: Any = opened["data"]
            instruction = str(json.loads(data.attrs["problem_info"])["language_instruction"])
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
) -> Demo:
    actions = np.asarray(group["actions"], np.float32)
    length = len(actions)
    if actions.ndim != 2 or actions.shape[1] != ACTION_DIM or length < 2:
        raise DatasetError(
            f"{file}: demo_{index}/actions has shape {actions.shape}, expected (2 or more, {ACTION_DIM})"
        )
    parts = [np.asarray(group[f"obs/{name}"], np.float32) for name in STATE]
    images = {camera: turned(np.asarray(group[f"obs/{name}"], np.uint8)) for camera, name in CAMERAS.items()}
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
    chosen = actions[kept]
    reward = np.zeros(len(kept), np.float32)
    reward[-1] = success
    episode = RecordedEpisode(
        task=file.name.removesuffix(".hdf5").removesuffix("_demo"),
        split="train",
        index=index,
        instruction=instruction,
        png={camera: [encode_png(seen[step - 1]) for step in kept] for camera, seen in images.items()},
        state=state[[step - 1 for step in kept]],
        actions=chosen,
        executed_actions=chosen,
        reward=reward,
        success=success,
        control_source=["expert"] * len(kept),
        policy_version="demonstration",
        final_png={camera: encode_png(seen[-1]) for camera, seen in images.items()},
        final_state=state[-1],
    )
    height, width = next(iter(images.values())).shape[1:3]
    return Demo(episode, (height, width), length - 1 - len(kept))


def _commands_nothing(actions: np.ndarray, step: int) -> bool:
    return bool(np.linalg.norm(actions[step, :-1]) < STILL and actions[step, -1] == actions[step - 1, -1])
