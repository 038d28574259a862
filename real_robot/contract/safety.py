"""The safety section of a robot's YAML: limits of each number of a command, the workspace, and the time-outs."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from real_robot.transports.base import QosConfig
from vla_rl.config import Config, ConfigError


class DimensionLimits(Config):
    """Limits of one number of a command.

    A `position` number is a set-point (joint angle, pose, gripper opening): the robot stays where it was last told.
    A `velocity` number is a speed (twist, joint velocity): the robot moves until it is told zero.
    """

    name: str = Field(description="Name, for messages and the log.")
    kind: Literal["position", "velocity"] = Field(description="Whether the number is a set-point or a speed.")
    low: float = Field(description="Smallest value ever sent, in the command's unit.")
    high: float = Field(description="Largest value ever sent.")
    max_velocity: float | None = Field(
        default=None, gt=0, description="Position: units per second between two sent values."
    )
    max_acceleration: float | None = Field(
        default=None, gt=0, description="Units per second squared (velocity: units per second)."
    )
    stop_acceleration: float | None = Field(
        default=None,
        gt=0,
        description="Acceleration while braking to hold or stop, at least max_acceleration, which is the default.",
    )
    max_jerk: float | None = Field(
        default=None,
        gt=0,
        description="Units per second cubed (velocity: units per second squared): how fast the acceleration changes. "
        "Needs max_acceleration.",
    )
    stop_jerk: float | None = Field(
        default=None,
        gt=0,
        description="Jerk while braking to hold or stop, at least max_jerk, which is the default.",
    )
    max_step: float | None = Field(default=None, gt=0, description="Largest change between two sent values.")
    state: int | None = Field(
        default=None,
        ge=0,
        description="Position: the number of the observed state that measures it; motion starts there.",
    )
    start: float | None = Field(
        default=None, description="Position without `state`: the value that the robot starts at."
    )

    follows: bool = Field(
        default=True,
        description="Position with `state`: it is measured where it was told to be. False for a gripper that closes on "
        "things, or whose measurement is a switch: neither its following error nor its jumps are checked.",
    )
    max_following_error: float | None = Field(
        default=None,
        gt=0,
        description="Position with `state`: how far it may be from every set-point of the last checks.following_lag "
        "seconds. The default is its way in a quarter of a second at its highest speed.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ConfigError(f"safety: {self.name}: low {self.low} must be below high {self.high}")
        stop, usual = self.stop_acceleration, self.max_acceleration
        if stop is not None and (usual is None or stop < usual):
            raise ConfigError(
                f"safety: {self.name}: stop_acceleration {stop} must be at least max_acceleration {usual}"
            )
        if self.max_jerk is not None and usual is None:
            raise ConfigError(f"safety: {self.name}: max_jerk {self.max_jerk} needs max_acceleration")
        if self.stop_jerk is not None and (self.max_jerk is None or self.stop_jerk < self.max_jerk):
            raise ConfigError(
                f"safety: {self.name}: stop_jerk {self.stop_jerk} must be at least max_jerk {self.max_jerk}"
            )
        if self.max_following_error is not None and (self.state is None or not self.follows):
            raise ConfigError(
                f"safety: {self.name}: max_following_error needs a position with state, and follows: true"
            )
        if self.kind == "velocity":
            if not self.low <= 0 <= self.high:
                raise ConfigError(f"safety: {self.name}: a velocity's limits {self.low}..{self.high} must include zero")
            if self.max_velocity is not None or self.state is not None or self.start is not None:
                raise ConfigError(
                    f"safety: {self.name}: max_velocity, state, start are for positions; low and high limit a velocity"
                )
            return self
        if self.max_velocity is None and self.max_step is None:
            raise ConfigError(f"safety: {self.name}: a position needs max_velocity or max_step")
        if (self.state is None) == (self.start is None):
            raise ConfigError(
                f"safety: {self.name}: a position needs either state (where it is measured) or start (its first value)"
            )
        if self.start is not None and not self.low <= self.start <= self.high:
            raise ConfigError(f"safety: {self.name}: start {self.start} is outside {self.low}..{self.high}")
        return self


class Workspace(Config):
    """A box that the end effector must not leave, in meters, in the frame of the observed position."""

    state: tuple[int, int, int] = Field(description="Which numbers of the observed state are the position x, y, z.")
    low: tuple[float, float, float] = Field(description="Lower corner of the box, x, y, z.")
    high: tuple[float, float, float] = Field(description="Upper corner of the box, x, y, z.")
    commands: tuple[int, int, int] | None = Field(
        default=None,
        description="Which numbers of the command move x, y, z, in the same frame. "
        "Without it (joint commands) leaving the box is a latched stop.",
    )

    meters_per_unit: float = Field(
        default=1.0,
        gt=0,
        description="Velocity commands: meters per second that a command of 1 means.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for axis, low, high in zip("xyz", self.low, self.high, strict=True):
            if not low < high:
                raise ConfigError(f"safety: workspace: {axis}: low {low} must be below high {high}")
        return self


class ChecksConfig(Config):
    """What the robot may report before it is held to be impossible. Each check holds, and stops where it lasts."""

    stop_after: float = Field(
        default=2.0,
        gt=0,
        description="Seconds of trouble, on and off, after which the hold becomes a stop. It is forgotten after as "
        "long without.",
    )
    limit_margin: float = Field(
        default=0.05, ge=0, description="Share of a joint's range that it may be measured beyond its limits."
    )
    workspace_margin: float = Field(
        default=0.05,
        ge=0,
        description="Meters that the end effector may be measured outside the workspace, under commands that move it "
        "(workspace.commands). Up to there the way back is open; under joint commands leaving the box is a stop.",
    )
    jump_speed: float = Field(
        default=3.0, gt=0, description="How many times its highest speed may be measured between two observations."
    )
    jump_margin: float = Field(
        default=0.05, ge=0, description="Share of a joint's range that is allowed beside, for noise."
    )
    pose_jump: float = Field(default=0.1, ge=0, description="Meters that are allowed beside, for the end effector.")
    following_lag: float = Field(
        default=0.3,
        ge=0,
        description="Seconds that a joint may follow its set-points late (max_following_error), or the end "
        "effector its velocities (motion_tolerance).",
    )
    motion_tolerance: float = Field(
        default=1.6,
        ge=0,
        description="Velocity commands with a workspace: how many times more, or less, the end effector may move than "
        "the sent velocities lead, less following_lag; 0: not checked.",
    )
    motion_margin: float = Field(default=0.01, gt=0, description="Meters that are allowed beside, for noise.")
    frozen_after: float = Field(
        default=1.0,
        ge=0,
        description="Seconds of the very same pixels, while the robot is measured to move; 0: not checked.",
    )
    stop_when_cut: bool = Field(
        default=False,
        description="Stop, not only say so, where more than a quarter of the commands of 2 s were cut by low and high, "
        "max_velocity or max_step.",
    )
    black_below: float = Field(
        default=5.0, ge=0, le=255, description="Mean brightness below which a camera is black; 0: not checked."
    )


class WrenchLimits(Config):
    """The largest force and torque that a robot, or a sensor at its wrist, may report."""

    topic: str = Field(min_length=1, description="geometry_msgs/WrenchStamped topic that reports them.")
    qos: QosConfig = QosConfig()
    max_force: float | None = Field(default=None, gt=0, description="N, the length of the vector; beyond it it holds.")
    max_torque: float | None = Field(
        default=None, gt=0, description="Nm, the length of the vector; beyond it it holds."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_force is None and self.max_torque is None:
            raise ConfigError(f"safety.wrench: {self.topic}: needs max_force (N), max_torque (Nm), or both")
        return self

    def trouble(self, force: float, torque: float) -> str | None:
        """Which of the two, in N and Nm, is beyond its limit; None: neither."""
        for name, unit, value, limit in (
            ("force", "N", force, self.max_force),
            ("torque", "Nm", torque, self.max_torque),
        ):
            if limit is not None and not value <= limit:
                return f"{name} is {value:.3g} {unit}, at most {limit:g} is allowed"
        return None


class SafetyConfig(Config):
    """What the supervisor lets through to the robot."""

    control_hz: float = Field(gt=0, le=1000, description="Control ticks per second.")
    dimensions: tuple[DimensionLimits, ...] = Field(min_length=1, description="One entry for each number of a command.")
    workspace: Workspace | None = Field(default=None, description="Box that the end effector stays in.")
    checks: ChecksConfig = Field(default=ChecksConfig(), description="Whether what the robot reports can be.")
    wrench: WrenchLimits | None = Field(
        default=None, description="Largest measured force and torque; null: not measured, or not checked."
    )
    observation_timeout: float = Field(
        default=0.25, gt=0, description="Seconds: hold when the newest observation, or wrench, is older."
    )
    command_timeout: float = Field(
        default=0.25,
        gt=0,
        description="Seconds: hold when the newest command is older. Position: where it is; velocity: 0.",
    )
    max_refused: int = Field(
        default=10,
        ge=1,
        description="Commands refused (NaN, wrong size) that make a latched stop. Holds and silence between change "
        "nothing; the count starts anew after as many commands in a row that were followed, and after a reset.",
    )
    deadman: bool = Field(default=False, description="Move only while a deadman switch is held.")
    deadman_timeout: float = Field(
        default=0.3, gt=0, description="Seconds without word from the switch that count as released."
    )
    dry_run: bool = Field(default=False, description="Compute and log everything, send nothing.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [d.name for d in self.dimensions]
        if len(set(names)) != len(names):
            raise ConfigError(f"safety.dimensions: names must differ, got {', '.join(names)}")
        box = self.workspace
        for number in (box.commands or ()) if box else ():
            if not 0 <= number < len(names):
                raise ConfigError(
                    f"safety.workspace.commands: {number}; a command has the numbers 0 to {len(names) - 1}"
                )
        kinds = {self.dimensions[i].kind for i in (box.commands or ())} if box else set()
        if len(kinds) > 1:
            raise ConfigError("safety.workspace.commands: must be all positions or all velocities")
        if "position" in kinds:
            self._check_positions_meet_box()
        return self

    def _check_positions_meet_box(self) -> None:
        assert self.workspace is not None and self.workspace.commands is not None, "checked by the caller"
        for number, low, high in zip(self.workspace.commands, self.workspace.low, self.workspace.high, strict=True):
            limits = self.dimensions[number]
            if not max(limits.low, low) < min(limits.high, high):
                raise ConfigError(f"safety: {limits.name}: its limits and the workspace have nothing in common")

    def stopping_time(self) -> float:
        """Seconds from a stop, at the highest speed that the limits allow, to standstill."""
        tick = 1.0 / self.control_hz
        times = [tick]
        for limits in self.dimensions:
            acceleration = limits.stop_acceleration or limits.max_acceleration
            speed = max(-limits.low, limits.high)
            if limits.kind == "position":
                steps = () if limits.max_step is None else (limits.max_step * self.control_hz,)
                speed = min((*steps, *(() if limits.max_velocity is None else (limits.max_velocity,))))
            if acceleration is not None:
                jerk = limits.stop_jerk or limits.max_jerk or math.inf
                times.append(speed / acceleration + (acceleration + (limits.max_acceleration or 0.0)) / jerk + tick)
            if limits.kind == "velocity" and limits.max_step is not None:
                times.append(speed / limits.max_step * tick + tick)
        return max(times)
