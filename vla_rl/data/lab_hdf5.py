"""Laboratories' HDF5 recordings as a LeRobotDataset: robomimic's (robomimic.github.io, "Dataset Structure"), ALOHA's.

    vla-rl import demos.hdf5 -o datasets/mine --instruction "lift the cube"

robomimic: many episodes a file.

data.attrs["env_args"]      JSON: which environment, and its arguments
data/demo_N/actions         (T, A), beside what was seen before
data/demo_N/obs/KEY         (T, D) numbers, or uint8 (T, height, width, 3) pictures, upright
data/demo_N/rewards         (T,), where success was told

ALOHA: one file an episode (tonyzhaozh/aloha, record_episodes.py).

observations/qpos (T, 14)             six joints and the gripper (0 closed, 1 open) of the left arm, then of the right
observations/images/cam_*             uint8 (T, height, width, 3), RGB; or JPEG, rows padded to the longest,
                                      whose bytes compress_len (cameras, T) counts
action (T, 14)                        where the leaders were: targets of the same joints, beside what was seen before
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import hdf5_files, numbers, open_hdf5, pictures
from vla_rl.data.importing import Gripper, demonstration, our_gripper, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode

_ROBOSUITE = 1  # robomimic's EnvType
_STATE = ("eef_pos", "eef_quat", "gripper_qpos")  # of each robosuite robot, robot0_..., robot1_...
_OSC = ("dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper")


@dataclass(frozen=True)
class RobomimicOptions:
    """How a file is read, where it does not say so itself.

    Attributes:
        fps: control steps a second; 0: the environment's. instruction: "": the episode's or the environment's.
        cameras: our name -> key in obs; empty: all pictures. state: keys in obs, in order; empty: of robosuite's robots
            the hand's position, its quaternion and the fingers. action: keys beside obs; empty: actions.
        gripper: of the action's last number. success: reward: where one is positive; all: each episode.
        episodes: at most so many; 0: all.
    """

    fps: int = 0
    instruction: str = ""
    cameras: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    gripper: Gripper = "as_is"
    success: Literal["reward", "all"] = "reward"
    episodes: int = 0


def import_robomimic(
    sources: Sequence[Path], dataset: Path, options: RobomimicOptions, report: Callable[[str], None] = print
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each demonstration; it appears whole.

    Args:
        sources: files, or folders of them, of one robot. dataset: folder to make; must not exist.
        report: told what each file gave, and what deserves a look.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: a file that is not such a one, or is damaged; the message names the part.
        ConfigError: an option names what is not there, or is needed.
    """
    files = hdf5_files(sources)
    with open_hdf5(files[0]) as opened:
        first = _Reader(opened, files[0], options)
        fps, state, action = first.fps(), first.state_names(), first.action_names()
        report(first.text())

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        count = 0
        for file in files:
            with open_hdf5(file) as opened:
                reader = _Reader(opened, file, options)
                for number, name in enumerate(reader.names, 1):
                    if options.episodes and count == options.episodes:
                        return
                    episode = reader.read(name, count)
                    yield f"{file}/data/{name}", episode
                    report(f"{file.name}: {name}: {episode.length} steps ({number} of {len(reader.names)})")
                    count += 1

    notes = {"source": "robomimic", "files": [file.name for file in files], **asdict(options)}
    is_told = options.gripper != "as_is"
    return write_episodes(
        episodes(),
        dataset,
        fps=fps,
        robot=first.robot,
        notes=notes,
        state_names=state,
        action_names=action,
        has_gripper=is_told,
        gripper_option="" if is_told or action is not None else "--gripper",
        report=report,
    )


class _Reader:
    """One open file.

    Attributes:
        names: of the episodes, in their numbers' order. robot: the environment's name. cameras: our name -> its key.
    """

    def __init__(self, opened: Any, file: Path, options: RobomimicOptions) -> None:
        self.data, self.where, self.options = opened["data"], f"{file}/data", options
        self.names = sorted(
            (n for n in self.data if n.startswith("demo_") and n[5:].isdecimal()), key=lambda n: int(n[5:])
        )
        if not self.names:
            raise DatasetError(f"{self.where}: holds no demo_0, demo_1, ...; found {', '.join(self.data) or 'nothing'}")
        self.env = _json(self.data.attrs.get("env_args", "{}"), f"{self.where}: attribute env_args")
        self.robot = str(self.env.get("env_name", "robomimic"))
        obs = self._obs(self.names[0])
        self.cameras = dict(options.cameras) or {
            key.removesuffix("_image"): key for key in sorted(obs) if getattr(obs[key], "ndim", 0) == 4
        }
        self.state = options.state or tuple(
            f"robot{number}_{part}" for number in range(8) for part in _STATE if f"robot{number}_{part}" in obs
        )
        for option, keys in (("--camera", self.cameras.values()), ("--state", self.state)):
            if unknown := [key for key in keys if key not in obs]:
                raise ConfigError(f"import: {option}: {unknown[0]!r} is none of obs: {', '.join(sorted(obs))}")
        self.action = options.action or ("actions",)

    def text(self) -> str:
        """How the file is read, a line."""
        cameras = ", ".join(f"{name} = {key}" for name, key in self.cameras.items()) or "none"
        state, action = " + ".join(self.state) or "none", " + ".join(self.action)
        return f"{self.robot}: cameras {cameras}; state {state}; action {action}"

    def fps(self) -> int:
        """Control steps a second."""
        told = self.options.fps or self.env.get("env_kwargs", {}).get("control_freq", 0)
        if not (isinstance(told, int | float) and 0 < told <= 1000):
            raise ConfigError(
                "import: the file does not say how fast the robot is controlled; give --fps (steps a second)"
            )
        return round(told)

    def state_names(self) -> list[str]:
        """Of the numbers of the state: of one number its key's, else numbered."""
        obs, names = self._obs(self.names[0]), []
        for key in self.state:
            size = numbers(obs, key, f"{self.where}/{self.names[0]}/obs").shape[1]
            names += [key] if size == 1 else [f"{key}.{number}" for number in range(size)]
        return names

    def action_names(self) -> list[str] | None:
        """Of robosuite's operational-space actions; None: not known."""
        robots = len({key.partition("_")[0] for key in self._obs(self.names[0]) if key.endswith("_eef_pos")})
        size = sum(numbers(self.data[self.names[0]], key, self.where).shape[1] for key in self.action)
        if self.env.get("type") != _ROBOSUITE or not robots or size != len(_OSC) * robots:
            return None
        return [name if robots == 1 else f"robot{number}_{name}" for number in range(robots) for name in _OSC]

    def read(self, name: str, index: int) -> RecordedEpisode:
        """An episode."""
        group, obs, where = self.data[name], self._obs(name), f"{self.where}/{name}"
        parts = [numbers(group, key, where) for key in self.action]
        length = len(parts[0])
        actions = np.concatenate([numbers(group, key, where, length) for key in self.action], axis=1)
        state = [numbers(obs, key, f"{where}/obs", length) for key in self.state]
        success = True
        if self.options.success == "reward" and "rewards" in group:
            success = bool(numbers(group, "rewards", where, length).max() > 0)
        return demonstration(
            self._instruction(name),
            index,
            {camera: pictures(obs, key, f"{where}/obs", length) for camera, key in self.cameras.items()},
            np.concatenate(state, axis=1) if state else np.zeros((length, 0), np.float32),
            our_gripper(where, actions, self.options.gripper),
            success=success,
        )

    def _obs(self, name: str) -> Any:
        group = self.data[name]
        if "actions" not in group and not self.options.action:
            raise DatasetError(
                f"{self.where}/{name}/actions: missing; there are {', '.join(group) or 'none'}; --action names another"
            )
        if "obs" not in group or not hasattr(group["obs"], "keys"):
            raise DatasetError(
                f"{self.where}/{name}/obs: missing: a file of simulator states alone has no observations; make them by "
                "robomimic's dataset_states_to_obs.py"
            )
        return group["obs"]

    def _instruction(self, name: str) -> str:
        told = _json(self.data[name].attrs.get("ep_meta", "{}"), f"{self.where}/{name}: attribute ep_meta").get("lang")
        text = self.options.instruction or told or self.env.get("lang") or ""
        if not isinstance(text, str) or not text.strip():
            raise ConfigError("import: the file does not say what the robot was told; give --instruction")
        return " ".join(text.split())


def _json(text: Any, what: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{what}: is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise DatasetError(f"{what}: is JSON of {type(values).__name__}, expected an object")
    return values


HZ = 50
_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
NAMES = {7 * len(sides): [side + name for side in sides for name in _ARM] for sides in (("",), ("left_", "right_"))}
_OTHERS = ("observations", "action", "compress_len")


def import_aloha(
    sources: Sequence[Path],
    dataset: Path,
    instruction: str,
    success: bool = True,
    fps: int = 0,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each file; it appears whole.

    Args:
        sources: files, or folders of them. dataset: folder to make; must not exist.
        instruction: what the robot was to do. success: whether it did. fps: control steps a second; 0: ALOHA's 50.
        report: told of each episode.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: a file that is not such a one, or is damaged; the message names the part.
        ConfigError: no files.
    """
    files = hdf5_files(sources)
    with open_hdf5(files[0]) as opened:
        size = numbers(opened, "action", str(files[0])).shape[1]
        states = numbers(opened["observations"], "qpos", f"{files[0]}/observations").shape[1]

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        for number, file in enumerate(files):
            with open_hdf5(file) as opened:
                episode = _read(opened, file, number, instruction, success)
                if left := sorted(set(opened) - set(_OTHERS)):
                    report(f"{file.name}: left out: {', '.join(left)}")
            report(f"{file.name}: {episode.length} steps")
            yield str(file), episode

    notes = {"source": "ALOHA", "files": [file.name for file in files]}
    return write_episodes(
        episodes(),
        dataset,
        fps=fps or HZ,
        robot="aloha",
        notes=notes,
        state_names=NAMES.get(states),
        action_names=NAMES.get(size),
    )


def _read(opened: Any, file: Path, number: int, instruction: str, success: bool) -> RecordedEpisode:
    where, seen = str(file), opened["observations"]
    actions = numbers(opened, "action", where)
    state = numbers(seen, "qpos", f"{where}/observations", len(actions))
    cameras = sorted(seen["images"]) if "images" in seen else []
    if not cameras:
        raise DatasetError(f"{where}/observations/images: holds no camera")
    png = {camera: pictures(seen["images"], camera, f"{where}/observations/images", len(actions)) for camera in cameras}
    if "compress_len" in opened:  # In the order of the recording script's cameras, which the file does not tell.
        counted, found = numbers(opened, "compress_len", where), np.array([[*map(len, own)] for own in png.values()])
        if counted.shape != found.shape or (np.sort(counted, 0) != np.sort(found, 0)).any():
            raise DatasetError(
                f"{where}/compress_len: {counted.shape} numbers that are not the lengths of the {found.shape} pictures "
                "(cameras, steps); the file is damaged. Leave it out"
            )
    return demonstration(instruction, number, png, state, actions, success=success)
