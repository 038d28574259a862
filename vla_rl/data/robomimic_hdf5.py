"""robomimic's datasets (robomimic.github.io, "Dataset Structure"), many episodes a file, as a LeRobotDataset.

    vla-rl import demos.hdf5 -o datasets/mine --instruction "lift the cube"

data.attrs["env_args"]      JSON: which environment, and its arguments
data/demo_N/actions         (T, A), beside what was seen before
data/demo_N/obs/KEY         (T, D) numbers, or uint8 (T, height, width, 3) pictures, upright
data/demo_N/rewards         (T,), where success was told
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import hdf5_files, numbers, open_hdf5, pictures
from vla_rl.data.importing import Gripper, LastNumbers, demonstration, our_gripper, write_episodes
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
    succeeded: Counter[bool] = Counter()

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        left = options.episodes or None
        for file in files:
            with open_hdf5(file) as opened:
                reader = _Reader(opened, file, options)
                for number, name in enumerate(reader.names[:left]):
                    episode = reader.read(name, sum(succeeded.values()))
                    succeeded[episode.success] += 1
                    yield f"{file}/data/{name}", episode
                    report(f"{file.name}: {name}: {episode.length} steps ({number + 1} of {len(reader.names)})")
            left = None if left is None else options.episodes - sum(succeeded.values())
            if left == 0:
                return

    notes = {"source": "robomimic", "files": [file.name for file in files], **asdict(options)}
    last, has_gripper = LastNumbers(), options.gripper != "as_is"
    done = write_episodes(
        last.watched(episodes()),
        dataset,
        fps=fps,
        robot=first.robot,
        notes=notes,
        state_names=state,
        action_names=action,
        has_gripper=has_gripper,
    )
    report(f"{succeeded[True]} of {succeeded.total()} episodes succeeded, as {options.success} says")
    for line in last.remarks(options.gripper, "--gripper") if action is None else ():
        report(line)
    return done


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
