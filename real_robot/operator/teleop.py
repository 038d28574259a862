"""Teleoperation: what keys, a gamepad or a SpaceMouse say, as a robot's command in the contract's units.

Every device gives `Axes`: six numbers in [-1, 1] and what the gripper should do. `Teleoperation` makes of them one
command, which the supervisor limits like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from real_robot.contract.safety import DimensionLimits, SafetyConfig
from real_robot.contract.sections import TeleopConfig
from vla_rl.config import ConfigError

AXES = ("x", "y", "z", "turn_x", "turn_y", "turn_z")
GripperCommand = Literal["open", "close"]
_TRANSLATION_NAMES = (("x", "y", "z"), ("vx", "vy", "vz"))
_ROTATION_NAMES = (("turn_x", "turn_y", "turn_z"), ("wx", "wy", "wz"), ("roll", "pitch", "yaw"))
_GRIPPER_NAMES = ("gripper", "gripper.pos")


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
