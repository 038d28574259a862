"""What a transport does: subscribe, advertise, and say when it cannot be relied on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from real_robot.bridge.messages import Message
from vla_rl.config import Config

Handler = Callable[[Message], None]
Publisher = Callable[[Message], None]


class TransportError(RuntimeError):
    """The robot's graph cannot be reached, or its library is missing; the message says what to do."""


class QosConfig(Config):
    """Quality of service of a topic, in ROS 2's words. ROS 1 and rosbridge know `depth` and `durability` alone."""

    reliability: Literal["reliable", "best_effort"] = Field(
        default="reliable", description="A best-effort reader also hears reliable writers, not the reverse."
    )
    durability: Literal["volatile", "transient_local"] = Field(
        default="volatile", description="transient_local: late subscribers get the last message (ROS 1: latched)."
    )
    depth: int = Field(default=1, ge=1, le=1000, description="Messages kept in the queue; 1 keeps the newest alone.")


class Transport(Protocol):
    """A connection to a robot's topics. Handlers are called on the transport's own threads."""

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        """Call `handler` with each message. Messages that cannot be read are dropped and counted in `unreadable`."""
        ...

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        """A function that publishes one message. It never blocks for long, and raises nothing when nobody listens."""
        ...

    def has_listener(self, topic: str) -> bool:
        """Whether somebody hears what is published there; True where the transport cannot know."""
        ...

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        """The joint names of that topic; None where the transport cannot know."""
        ...

    @property
    def fault(self) -> str | None:
        """Why the graph cannot be relied on now (its master or bridge is gone), or None."""
        ...

    @property
    def unreadable(self) -> dict[str, int]:
        """Topic -> messages dropped because they could not be read."""
        ...

    def close(self) -> None:
        """Leave the graph. May be called twice."""
        ...


class TransportConfig(Config):
    """Base of the transports' configs; `kind` chooses."""

    kind: str
    EXTRA: ClassVar[str] = "ros"

    def open(self) -> Transport:
        """Connect.

        Raises:
            TransportError: the library is missing or nothing answers.
        """
        module, _, name = _CLASSES[self.kind].partition(":")
        try:
            opener: Any = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise TransportError(
                f"transport {self.kind}: {error}. Install what it needs: pip install 'vla-rl[{self.EXTRA}]'"
            ) from error
        return opener(self)


class Ros1Config(TransportConfig):
    """ROS 1 through rospy."""

    kind: Literal["ros1"] = "ros1"
    master: str = Field(default="", description="ROS_MASTER_URI; empty takes it from the environment.")
    host: str = Field(default="", description="ROS_IP, this machine's address for the others; empty: from environment.")
    node: str = Field(default="vla_rl", description="Node name; a number is added, so that two can run.")
    check_period: float = Field(default=0.5, gt=0, description="Seconds between looks whether the master answers.")


class Ros2Config(TransportConfig):
    """DDS with ROS 2's topic and type names, through cyclonedds; needs no ROS 2 installation."""

    kind: Literal["ros2"] = "ros2"
    domain: int = Field(default=0, ge=0, le=232, description="ROS_DOMAIN_ID.")
    distro: Literal["humble", "iron", "jazzy", "kilted"] = Field(
        default="humble", description="Whose message definitions to use."
    )


class RosbridgeConfig(TransportConfig):
    """A rosbridge server, in front of ROS 1 or ROS 2, through roslibpy."""

    kind: Literal["rosbridge"] = "rosbridge"
    url: str = Field(default="ws://127.0.0.1:9090", description="The server's address, ws:// or wss://.")
    ros: Literal[1, 2] = Field(default=1, description="Which ROS runs behind it: times and type names differ.")
    timeout: int = Field(default=10, gt=0, description="Seconds to wait for the first connection.")


class LeRobotConfig(TransportConfig):
    """A robot of LeRobot's, on this machine: `robot` and the settings of its LeRobot config class."""

    kind: Literal["lerobot"] = "lerobot"
    EXTRA: ClassVar[str] = "lerobot"
    robot: str = Field(description="LeRobot's name of it, such as so101_follower.")
    id: str = Field(default="", description="Which one: the name that it was calibrated under.")
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
        default=0.25, gt=0, description="Seconds: a command that waited longer for the bus is dropped."
    )
    resume_within: float = Field(
        default=3.0,
        gt=0,
        description="After an outage longer than max_command_age, commands are withheld until one lies within this of "
        "where every joint is, in the robot's units.",
    )
    patience: float = Field(
        default=1.0,
        gt=0,
        description="Seconds that the bus may fail or not answer before the robot is stopped until a person resets it; "
        "it holds earlier, when its observation is too old.",
    )


_CLASSES = {
    "lerobot": "real_robot.bridge.transports.lerobot:LeRobotTransport",
    "ros1": "real_robot.bridge.transports.ros1:Ros1Transport",
    "ros2": "real_robot.bridge.transports.ros2:Ros2Transport",
    "rosbridge": "real_robot.bridge.transports.rosbridge:RosbridgeTransport",
}
