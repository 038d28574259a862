"""The teleop section of a robot's contract: how a person's keys, gamepad or leader arm drive it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from real_robot.finite_config import FiniteConfig
from vla_rl.config import Config, ConfigError


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
