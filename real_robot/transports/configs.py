"""Configs of the transports whose libraries may be missing: each imports its transport when it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import Field

from real_robot.transports.base import Transport, TransportConfig, TransportError


@contextmanager
def _library(kind: str) -> Iterator[None]:
    """Turn the failed import of a transport's library into a TransportError that says what to install."""
    try:
        yield
    except ImportError as error:
        raise TransportError(f"transport {kind}: {error}. Install what it needs: pip install '.[ros]'") from error


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
        return Ros2Transport(self.domain, self.distro)


class RosbridgeConfig(TransportConfig):
    """A rosbridge server, in front of ROS 1 or ROS 2, through roslibpy."""

    kind: Literal["rosbridge"] = "rosbridge"
    url: str = Field(default="ws://127.0.0.1:9090", description="The server's address, ws:// or wss://.")
    ros: Literal[1, 2] = Field(default=1, description="Which ROS runs behind it: times and type names differ.")

    def open(self) -> Transport:
        """Connect; see `RosbridgeTransport`."""
        with _library(self.kind):
            from real_robot.transports.rosbridge import RosbridgeTransport
        return RosbridgeTransport(self.url, self.ros)
