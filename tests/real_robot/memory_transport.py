"""A transport within the process: a dictionary of topics. For tests of what stands above transports.

It is also a transport from outside the package, in one file: `transport: {kind: "memory_transport:MemoryConfig"}`.
"""

from __future__ import annotations

from collections import defaultdict

from pydantic import Field

from real_robot.transports.base import Handler, Publisher, QosConfig, TransportConfig
from real_robot.transports.messages import Message


class MemoryConfig(TransportConfig):
    """Options of a `MemoryTransport`."""

    graph: str = Field(default="test", description="Configs with the same name open the same transport.")

    def open(self) -> MemoryTransport:
        """Return the transport of that name."""
        return GRAPHS.setdefault(self.graph, MemoryTransport())


class MemoryTransport:
    """Delivers at once, on the caller's thread; keeps what was published in `sent`."""

    def __init__(self) -> None:
        self.handlers: dict[str, list[Handler]] = defaultdict(list)
        self.sent: dict[str, list[Message]] = defaultdict(list)
        self.fault: str | None = None
        self.unreadable: dict[str, int] = {}
        self.closed = False

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        self.handlers[topic].append(handler)

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        def publish(message: Message) -> None:
            assert isinstance(message, message_type)
            self.sent[topic].append(message)
            self.deliver(topic, message)

        return publish

    def deliver(self, topic: str, message: Message) -> None:
        for handler in self.handlers[topic]:
            handler(message)

    def has_listener(self, topic: str) -> bool:
        return True

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        return None

    def close(self) -> None:
        self.closed = True


GRAPHS: dict[str, MemoryTransport] = {}
