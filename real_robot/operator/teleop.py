"""A person's hands to a robot's command: what keys, a gamepad or a SpaceMouse say, in the contract's units.

Every device gives `Axes`: six numbers in [-1, 1] and what the gripper should do. `Teleoperation` makes of them one
command, which the supervisor limits like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from real_robot.control.safety_config import DimensionLimits, SafetyConfig
from real_robot.finite_config import FiniteConfig
from vla_rl.config import Config, ConfigError

AXES = ("x", "y", "z", "turn_x", "turn_y", "turn_z")
GripperCommand = Literal["open", "close"]
_TRANSLATION_NAMES = (("x", "y", "z"), ("vx", "vy", "vz"))
_ROTATION_NAMES = (("turn_x", "turn_y", "turn_z"), ("wx", "wy", "wz"), ("roll", "pitch", "yaw"))
_GRIPPER_NAMES = ("gripper", "gripper.pos")


class DeviceConfig(Config):
    """A person's device at the robot's own computer, in place of the console's keys. Used with a console alone."""

    kind: Literal["lerobot", "spacemouse"] = Field(description="LeRobot's teleoperators, or a 3Dconnexion SpaceMouse.")
    teleoperator: str = Field(default="", description="LeRobot's name of the device, such as so101_leader or gamepad.")
    id: str = Field(default="", description="LeRobot: the name that it was calibrated under.")
    port: str = Field(default="", description="LeRobot: serial port, such as /dev/ttyACM1; empty: it has none.")
    settings: dict[str, Any] = Field(default={}, description="Other fields of the teleoperator's LeRobot config.")
    modules: tuple[str, ...] = Field(default=(), description="Python modules to import first, as for the transport.")
    names: dict[str, str] = Field(
        default={}, description="The leader's name of a joint -> the contract's, where they differ."
    )
    align_within: float = Field(
        default=0.03,
        gt=0,
        le=0.25,
        description="A leader arm drives once each joint is this near the robot's set-point, as a share of low..high.",
    )
    align: Literal["person", "drive_leader"] = Field(
        default="person",
        description="How a leader arm comes to where the robot is at a take-over. person: by hand, the console says "
        "which joint to move. drive_leader: its own motors bring it there, and let go; where it is held fast, the "
        "person does.",
    )
    align_speed: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="With drive_leader, how fast its joints are driven: shares of low..high a second.",
    )
    phone_reach: float = Field(
        default=0.12, gt=0.01, le=1, description="A phone: meters from where it was pressed that are full deflection."
    )
    phone_turn: float = Field(
        default=0.6, gt=0.05, le=3, description="A phone: radians from how it was held when pressed, likewise."
    )
    read_hz: float = Field(default=60.0, gt=0, le=1000, description="Reads a second.")

    @model_validator(mode="after")
    def _check(self) -> DeviceConfig:
        if (self.kind == "lerobot") != bool(self.teleoperator):
            raise ConfigError("teleop.device: `teleoperator` belongs to kind lerobot, and is required there")
        return self


class TeleopConfig(FiniteConfig):
    """How a person's axes become a command. What is left out is found by the names in `safety.dimensions`."""

    translation: tuple[int, int, int] | None = Field(
        default=None,
        description="Which numbers of the command move x, y, z. Default: safety.workspace.commands, else those named "
        "x, y, z or vx, vy, vz.",
    )
    rotation: tuple[int, int, int] | None = Field(
        default=None,
        description="Which numbers turn about x, y, z. Default: those named turn_x, ..., wx, ..., or roll, pitch, yaw.",
    )
    gripper: int | None = Field(
        default=None, description="Which number is the gripper. Default: the one named gripper."
    )
    gripper_open: float | None = Field(
        default=None, description="The gripper's value when open. Default: its lower limit."
    )
    gripper_closed: float | None = Field(
        default=None, description="The gripper's value when closed. Default: its upper limit."
    )
    directions: tuple[float, float, float, float, float, float] = Field(
        default=(1, 1, 1, 1, 1, 1),
        description="Factor of each axis, x, y, z, turn_x, turn_y, turn_z: -1 turns one round, so that 'left' is left.",
    )
    device: DeviceConfig | None = Field(default=None, description="A leader arm, gamepad or SpaceMouse.")
    speed: float = Field(
        default=0.5, gt=0, le=1, description="Full deflection, as a share of the speed that the safety limits allow."
    )
    timeout: float = Field(
        default=0.25,
        gt=0,
        le=2,
        description="Seconds without word from the person's device, or with its keys released, after which it holds.",
    )


@dataclass(frozen=True)
class Axes:
    """What a person's hands do at one time.

    Attributes:
        values: float32 (6,) in [-1, 1]: x, y, z, turn_x, turn_y, turn_z.
        gripper: what it should do; None leaves it as it is.
    """

    values: np.ndarray
    gripper: GripperCommand | None = None


class Teleoperation:
    """Makes commands of axes.

    Raises:
        ConfigError: an index that the command does not have, or one named twice.
    """

    def __init__(self, config: TeleopConfig, safety: SafetyConfig) -> None:
        self.config = config
        self._dimensions, self._rate = safety.dimensions, safety.control_hz
        box = safety.workspace.commands if safety.workspace else None
        self._translation = config.translation or box or self._named(_TRANSLATION_NAMES)
        self._rotation = config.rotation or self._named(_ROTATION_NAMES)
        gripper = [i for i, d in enumerate(self._dimensions) if d.name in _GRIPPER_NAMES]
        self._gripper = config.gripper if config.gripper is not None else next(iter(gripper), None)
        used = [*(self._translation or ()), *(self._rotation or ())]
        used += [] if self._gripper is None else [self._gripper]
        if wrong := [i for i in used if not 0 <= i < len(self._dimensions)]:
            raise ConfigError(f"teleop: {wrong[0]}; a command has the numbers 0 to {len(self._dimensions) - 1}")
        if len(set(used)) < len(used):
            raise ConfigError(f"teleop: translation, rotation and gripper name a number twice: {used}")

    def _named(self, choices: Sequence[tuple[str, str, str]]) -> tuple[int, int, int] | None:
        names = [d.name for d in self._dimensions]
        for x, y, z in choices:
            if {x, y, z} <= set(names):
                return names.index(x), names.index(y), names.index(z)
        return None

    @property
    def moves(self) -> tuple[str, ...]:
        """The axes that move something, and "gripper"."""
        axes = (AXES[:3] if self._translation else ()) + (AXES[3:] if self._rotation else ())
        return axes + (("gripper",) if self._gripper is not None else ())

    def command(self, axes: Axes, last: np.ndarray | None) -> np.ndarray:
        """The command, float32 (A,).

        Args:
            last: float32 (A,), what the robot was told last: where set-points go on from. None: not told yet.
        """
        now = np.array([self._rest(d, None if last is None else last[i]) for i, d in enumerate(self._dimensions)])
        deflection = np.clip(np.nan_to_num(axes.values), -1, 1) * self.config.directions
        for numbers, part in ((self._translation, deflection[:3]), (self._rotation, deflection[3:])):
            for number, value in zip(numbers or (), part, strict=bool(numbers)):
                limits = self._dimensions[number]
                way = value * self.config.speed * self._full_speed(limits)
                now[number] = np.clip(now[number] + way, limits.low, limits.high)
        if self._gripper is not None and axes.gripper is not None:
            now[self._gripper] = self.gripper_value(axes.gripper)
        return now.astype(np.float32)

    def gripper_value(self, command: GripperCommand) -> float:
        assert self._gripper is not None, "a command with a gripper"
        limits, config = self._dimensions[self._gripper], self.config
        told, usual = (config.gripper_open, limits.low) if command == "open" else (config.gripper_closed, limits.high)
        return usual if told is None else told

    @staticmethod
    def _rest(limits: DimensionLimits, last: float | None) -> float:
        """What leaves this number as it is: zero speed, the last set-point."""
        if limits.kind == "velocity":
            return 0.0
        return last if last is not None else limits.start if limits.start is not None else 0.0

    def _full_speed(self, limits: DimensionLimits) -> float:
        """What full deflection adds in one tick: to a speed (from 0), or to a set-point."""
        if limits.kind == "velocity":
            return min(-limits.low, limits.high) if limits.low < 0 < limits.high else max(-limits.low, limits.high)
        steps = [] if limits.max_velocity is None else [limits.max_velocity / self._rate]
        steps += [] if limits.max_step is None else [limits.max_step]
        return min(steps)
