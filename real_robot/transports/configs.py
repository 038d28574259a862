"""Options of the transports that come with the package; each opens its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field

from real_robot.transports.base import Transport, TransportConfig, TransportError


@contextmanager
def _library(kind: str, extra: str = "ros") -> Iterator[None]:
    """Turn the failed import of a transport's library into a TransportError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise TransportError(
            f"transport {kind}: {error}. Install what it needs: pip install 'vla-rl[{extra}]'"
        ) from error


class Ros1Config(TransportConfig):
    """ROS 1 through rospy."""

    kind: Literal["ros1"] = "ros1"
    master: str = Field(default="", description="ROS_MASTER_URI; empty takes it from the environment.")
    host: str = Field(
        default="", description="ROS_IP, this machine's address for the others; empty takes it from the environment."
    )
    node: str = Field(default="vla_rl", description="Node name; a number is added, so that two can run.")
    check_period: float = Field(
        default=0.5, gt=0, allow_inf_nan=False, description="Seconds between looks whether the master answers."
    )

    def open(self) -> Transport:
        """Connect; see `Ros1Transport`."""
        with _library(self.kind):
            from real_robot.transports.ros1 import Ros1Transport
        return Ros1Transport(self)


class Ros2Config(TransportConfig):
    """DDS with ROS 2's topic and type names, through cyclonedds; needs no ROS 2 installation."""

    kind: Literal["ros2"] = "ros2"
    domain: int = Field(default=0, ge=0, le=232, description="ROS_DOMAIN_ID.")
    distro: Literal["humble", "iron", "jazzy", "kilted"] = Field(
        default="humble", description="Whose message definitions to use."
    )

    def open(self) -> Transport:
        """Connect; see `Ros2Transport`."""
        with _library(self.kind):
            from real_robot.transports.ros2 import Ros2Transport
        return Ros2Transport(self)


class RclpyConfig(TransportConfig):
    """ROS 2 through rclpy: needs ROS 2 installed and sourced, with a Python that is ours."""

    kind: Literal["rclpy"] = "rclpy"
    node: str = Field(default="vla_rl_bridge", description="Node name.", pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    domain: int | None = Field(
        default=None, ge=0, le=232, description="ROS_DOMAIN_ID; null takes it from the environment."
    )
    threads: int = Field(default=4, ge=1, le=64, description="Threads that messages are read on.")

    def open(self) -> Transport:
        """Connect; see `RclpyTransport`."""
        try:
            importlib.import_module("rclpy")
        except ImportError as error:
            raise TransportError(
                f"transport rclpy: {error}. Source a ROS 2 whose Python is this one (docs/ros.md); the transport ros2 "
                "needs none"
            ) from error
        from real_robot.transports.rclpy_node import RclpyTransport

        return RclpyTransport(self)


class RosbridgeConfig(TransportConfig):
    """A rosbridge server, in front of ROS 1 or ROS 2, through roslibpy."""

    kind: Literal["rosbridge"] = "rosbridge"
    url: str = Field(default="ws://127.0.0.1:9090", description="The server's address, ws:// or wss://.")
    ros: Literal[1, 2] = Field(default=1, description="Which ROS runs behind it: times and type names differ.")
    timeout: int = Field(default=10, gt=0, description="Seconds to wait for the first connection.")

    def open(self) -> Transport:
        """Connect; see `RosbridgeTransport`."""
        with _library(self.kind):
            from real_robot.transports.rosbridge import RosbridgeTransport
        return RosbridgeTransport(self)


class LeRobotConfig(TransportConfig):
    """A robot of LeRobot's, on this machine: `robot` and the settings of its LeRobot config class."""

    kind: Literal["lerobot"] = "lerobot"
    robot: str = Field(description="LeRobot's name of the robot, such as so101_follower.")
    id: str = Field(default="", description="The name under which the robot was calibrated.")
    port: str = Field(default="", description="Serial port, such as /dev/ttyACM0; empty for robots without one.")
    cameras: dict[str, dict[str, Any]] = Field(
        default={},
        description="Camera name -> `type` (opencv, intelrealsense) and settings of LeRobot's camera config.",
    )
    settings: dict[str, Any] = Field(default={}, description="Other fields of the robot's LeRobot config.")
    modules: tuple[str, ...] = Field(
        default=(), description="Python modules to import first: they may register robots and cameras with LeRobot."
    )
    read_hz: float = Field(default=30.0, gt=0, le=1000, description="Reads a second of joints and cameras.")
    max_command_age: float = Field(
        default=0.25,
        gt=0,
        allow_inf_nan=False,
        description="Seconds: a command that waited longer for the bus is dropped.",
    )
    resume_within: float = Field(
        default=3.0,
        gt=0,
        allow_inf_nan=False,
        description="After an outage longer than max_command_age, commands are withheld until one lies within this of "
        "where every joint is, in the robot's units.",
    )
    patience: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that the bus may fail or not answer before the robot is stopped until a person resets it; "
        "it holds earlier, when its observation is too old.",
    )

    def open(self) -> Transport:
        """Connect; see `LeRobotTransport`."""
        with _library(self.kind, "lerobot"):
            from real_robot.transports.lerobot import LeRobotTransport
        return LeRobotTransport(self)
