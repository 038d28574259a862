"""The transport interface: subscribe, advertise, and say when it cannot be relied on."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from real_robot.transports.messages import Message, MessageError
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


@dataclass(frozen=True)
class Endpoint:
    """One node that publishes, or listens, on a topic.

    Attributes:
        topic: its name, with a leading slash. type: as messages are named here, such as sensor_msgs/JointState.
        node: the node's name, or what the graph knows it by. publishes: it publishes; else it listens.
        reliability: "reliable", "best_effort", or "" where the graph has no such thing.
        unspoken: why the service behind it cannot be called; empty where it can.
    """

    topic: str
    type: str
    node: str
    publishes: bool
    reliability: str = ""
    unspoken: str = ""


@runtime_checkable
class Surveyor(Protocol):
    """A transport that can look around: what `vla-rl doctor` asks for, and no transport needs."""

    def survey(self) -> list[Endpoint]:
        """Every other node's ends of topics, as far as the graph knows them now.

        Raises:
            TransportError: the graph does not answer.
        """
        ...


@runtime_checkable
class Graph(Transport, Protocol):
    """A transport whose topics reach other processes too, under any name: a ROS graph."""

    def other_publishers(self, topic: str) -> list[str] | None:
        """Who else publishes on a topic now, a name for each publisher; None where that cannot be told."""
        ...


class TransportConfig(Config):
    """Base of every transport's options: the `transport` section of a robot's contract.

    A transport of your own needs one file and no entry here: a subclass with an `open`, and in the contract
    `transport: {kind: "package.module:Class", ...}`.
    """

    kind: str = Field(description="The transport's name, or package.module:Class of a user's own config class.")

    def open(self) -> Transport:
        """Connect to the robot's topics.

        Raises:
            TransportError: the library is missing or nothing answers.
        """
        raise NotImplementedError(f"{type(self).__name__} is a transport's config and needs a method open()")


class GraphConnection:
    """Base of transports to a ROS graph: messages that cannot be read are dropped, and counted by topic.

    Attributes:
        graph: which graph it is, the same words in each process of this machine.
        discovery: seconds that a newcomer may need to find all others, and they it.
    """

    discovery = 6.0  # of DDS on a busy machine

    def __init__(self, graph: str) -> None:
        self.graph = graph
        self._unreadable: Counter[str] = Counter()

    @property
    def unreadable(self) -> dict[str, int]:
        return dict(self._unreadable)

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        """Not known: messages name their joints."""
        return None

    def _receiver(self, topic: str, read: Callable[[Any], Message], handler: Handler) -> Callable[[Any], None]:
        """Whatever the library gives as a message goes through `read`, then to the handler."""

        def receive(native: Any) -> None:
            try:
                message = read(native)
            except MessageError:
                self._unreadable[topic] += 1
                return
            handler(message)

        return receive


def node_name(role: str) -> str:
    """A name that no other process' node has: what it is, its machine, its number there."""
    return re.sub(r"\W", "_", f"vla_rl_{role}_{socket.gethostname()}_{os.getpid()}")
