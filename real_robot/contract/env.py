"""`env.kind: robot`: facts of a robot's contract, or of a dataset of its recordings. Nothing is stepped."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from vla_rl.config import Config, ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.keyframes import task_of
from vla_rl.data.lerobot_io import ACTION
from vla_rl.data.source import LeRobotSource
from vla_rl.interfaces import EnvConfig
from vla_rl.types import EnvSpec

DEFAULT_SIZE = 224  # pixels, of a camera whose contract does not say
_SECONDS = 60  # that an episode takes at most, where no dataset tells


class RobotEnvConfig(EnvConfig):
    """A robot as its contract or its recordings describe it, without a simulator."""

    not_stepped: ClassVar[str] = (
        "env.kind: robot knows a robot's recordings, and nothing that answers an action. Success and RL need a "
        "simulator (env.kind: gymnasium, remote, ...), a world model of the recordings (`vla-rl world-model fit`) "
        "with a reward (`vla-rl reward fit`), or the robot itself (`vla-rl deploy --record`). Without any: sft, "
        "offline, reward fit, world-model fit, hil with hil.actor=recordings, and `eval`, which measures action "
        "errors on held-out episodes"
    )

    kind: Literal["robot"] = "robot"
    contract: str = Field(
        default="", description="The robot's contract (YAML), or the name of a shipped one; empty: the dataset tells."
    )
    dataset: str = Field(
        default="",
        description="A LeRobotDataset of the robot's; with a contract too, only its instructions and lengths count.",
    )
    cameras: tuple[str, ...] = Field(default=(), description="Cameras to take, in this order; empty: all.")
    instructions: tuple[str, ...] = Field(
        default=(), description="What the robot is told; empty: the dataset's instructions."
    )
    image_size: PositiveInt | None = Field(
        default=None,
        description="Side of the square pictures that a world model learns; null: as the first camera has them. "
        "Policies are resized to by sft.image_size.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> RobotEnvConfig:
        if not (self.contract or self.dataset):
            raise ConfigError(
                "env.dataset: kind robot takes its facts from a dataset or a contract; give env.dataset=FOLDER (a "
                "LeRobotDataset; `vla-rl import` makes one) or env.contract=FILE"
            )
        if not (self.dataset or self.instructions):
            raise ConfigError("env.instructions: a contract names no task; give what the robot is told, or env.dataset")
        return self

    def env_spec(self) -> EnvSpec:
        """See `EnvConfig.env_spec`.

        Raises:
            ConfigError: the contract cannot be read, the two do not describe one robot, or there is no such camera.
            DatasetError: the dataset is missing or damaged.
        """
        source = LeRobotSource(self.dataset) if self.dataset else None
        facts = _of_dataset(source) if source else None
        if self.contract:
            told = _of_contract(load_contract(self.contract))
            if facts is not None:
                _check_same(told, facts)
            facts = told
        assert facts is not None, "one of them is given"
        cameras = self.cameras or tuple(facts.cameras)
        if unknown := sorted(set(cameras) - set(facts.cameras)):
            raise ConfigError(f"env.cameras: got {unknown[0]!r}; the robot has {', '.join(facts.cameras) or 'none'}")
        lengths = _longest(source) if source else {}
        texts = self.instructions or tuple(lengths)
        usual = max(lengths.values(), default=round(_SECONDS * facts.control_hz))
        own = facts.cameras[cameras[0]] if cameras else (DEFAULT_SIZE, DEFAULT_SIZE)
        return EnvSpec(
            kind=self.kind,
            tasks={task_of(text): text for text in texts},
            horizon={task_of(text): lengths.get(text, usual) for text in texts},
            cameras=cameras,
            image_size=(self.image_size, self.image_size) if self.image_size else own,
            state_dim=len(facts.state_names),
            action_dim=len(facts.action_names),
            action_low=np.array(facts.low, np.float32),
            action_high=np.array(facts.high, np.float32),
            control_hz=facts.control_hz,
            action_names=facts.action_names,
            state_names=facts.state_names,
        )

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> NoReturn:
        """Refuse, since nothing can be stepped."""
        raise ConfigError(self.not_stepped)


class _Facts(Config):
    """A robot's, from one of the two.

    Attributes:
        source: for messages. cameras: name -> (height, width). low, high: bounds of the A numbers of the action.
    """

    source: str
    control_hz: float
    cameras: dict[str, tuple[int, int]]
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def _of_contract(contract: RobotContract) -> _Facts:
    sizes = {name: image.size or image.published for name, image in contract.observation.images.items()}
    return _Facts(
        source=f"contract {contract.name}",
        control_hz=contract.rate,
        cameras={name: size or (DEFAULT_SIZE, DEFAULT_SIZE) for name, size in sizes.items()},
        state_names=contract.observation.state_names,
        action_names=contract.action_names,
        low=tuple(limits.low for limits in contract.safety.dimensions),
        high=tuple(limits.high for limits in contract.safety.dimensions),
    )


def _of_dataset(source: LeRobotSource) -> _Facts:
    low, high = _action_range(source)
    return _Facts(
        source=f"dataset {source.root}",
        control_hz=source.fps,
        cameras={name: _size(source.info["features"][key]) for name, key in source.cameras.items()},
        state_names=source.state_names,
        action_names=source.action_names,
        low=tuple(low),
        high=tuple(high),
    )


def _size(feature: dict[str, Any]) -> tuple[int, int]:
    """(height, width) of a camera, whose feature has the channels first or last."""
    shape = [int(size) for size in feature["shape"]]
    height, width = shape[1:] if shape[0] == 3 and shape[2] != 3 else shape[:2]
    return height, width


def _action_range(source: LeRobotSource) -> tuple[np.ndarray, np.ndarray]:
    """float64 (A,) each: the smallest and the largest action recorded, apart where one never changes."""
    file = source.root / "meta" / "stats.json"
    try:
        stats = json.loads(file.read_text(encoding="utf-8"))[ACTION]
        low, high = (np.asarray(stats[name], np.float64).reshape(source.action_dim) for name in ("min", "max"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{file}: missing or damaged ({type(error).__name__}: {error}); LeRobot writes it. Copy the dataset again, "
            "or give env.contract"
        ) from error
    still = np.where(high - low < 1e-6, 1e-3, 0.0)
    return low - still, high + still


def _longest(source: LeRobotSource) -> dict[str, int]:
    """Instruction -> control steps of its longest episode."""
    texts = source.episode_column("tasks")
    lengths: dict[str, int] = {}
    for number, length in enumerate(map(int, source.lengths)):
        text = texts[number][0] if texts else source.instructions[0]
        lengths[text] = max(length, lengths.get(text, 0))
    return lengths


def _check_same(contract: _Facts, dataset: _Facts) -> None:
    """
    Raises:
        ConfigError: the two are of different robots.
    """
    pairs = (
        ("numbers of the action", len(contract.action_names), len(dataset.action_names)),
        ("numbers of the state", len(contract.state_names), len(dataset.state_names)),
        ("control steps a second", contract.control_hz, dataset.control_hz),
    )
    for what, told, found in pairs:
        if told != found:
            raise ConfigError(
                f"env.contract: {contract.source} has {told:g} {what}, {dataset.source} {found:g}; they are not of one "
                "robot and control mode: name the contract that it was recorded under, or leave one out"
            )
    if lacking := sorted(set(contract.cameras) - set(dataset.cameras)):
        raise ConfigError(
            f"env.contract: {contract.source} has the camera {lacking[0]!r}, {dataset.source} "
            f"{', '.join(dataset.cameras) or 'none'}; name them alike, or take fewer by env.cameras and one source"
        )
