"""Listening period on a robot's topics: arrival times, and how often an observation was whole."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from real_robot.bridge.cameras import Camera, LocalCamera
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.channels import CameraConfig
from real_robot.contract.contract import RobotContract
from real_robot.transports.base import Endpoint, Handler, QosConfig, Surveyor, Transport, TransportError
from real_robot.transports.messages import Message

MAX_KEPT = 20_000  # messages of one topic whose times are kept
SETTLE = 0.5  # seconds after the first message of all topics, in which connections are still being made


@dataclass
class Heard:
    """The messages of one topic while it was listened to.

    Attributes:
        times: (arrival on the monotonic clock in seconds, arrival minus header stamp in seconds) of each.
        newest: the last one. names: joint names of all, where they have such.
    """

    times: list[tuple[float, float]] = field(default_factory=list)
    newest: Message | None = None
    unstamped: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, message: Message) -> None:
        if len(self.times) < MAX_KEPT:
            self.times.append((time.monotonic(), (time.time_ns() - message.stamp) / 1e9))
        self.unstamped += message.HAS_HEADER and message.stamp == 0
        self.names.update(getattr(message, "name", ()))
        self.newest = message

    @property
    def rate(self) -> float:
        """Messages a second."""
        if len(self.times) < 2:
            return 0.0
        return (len(self.times) - 1) / max(self.times[-1][0] - self.times[0][0], 1e-9)

    @property
    def gap(self) -> float:
        """Seconds between messages that 95 of 100 gaps do not exceed."""
        arrivals = [arrival for arrival, _ in self.times]
        return float(np.percentile(np.diff(arrivals), 95)) if len(arrivals) > 1 else float("inf")

    @property
    def lag(self) -> float:
        """Seconds from header stamp to arrival, the shortest: what the network adds is never negative."""
        return min(lag for _, lag in self.times)


class ListeningTransport:
    """Passes subscriptions on, and keeps what they deliver. Nothing can be sent through it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.heard: dict[str, Heard] = defaultdict(Heard)
        self._subscribed: set[str] = set()
        self._lock = threading.Lock()

    def hearing(self, key: str, handler: Handler) -> Handler:
        """The handler, with what it is given kept under that key."""

        def receive(message: Message) -> None:
            with self._lock:
                self.heard[key].add(message)
            handler(message)

        return receive

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        is_first = topic not in self._subscribed  # a message of two subscriptions is one
        self._subscribed.add(topic)
        self.inner.subscribe(topic, message_type, qos, self.hearing(topic, handler) if is_first else handler)

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self.heard.clear()

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> NoReturn:
        raise AssertionError(f"{topic}: whoever only listens sends nothing")

    def has_listener(self, topic: str) -> bool:
        return self.inner.has_listener(topic)

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        return self.inner.joints_of(topic)

    @property
    def fault(self) -> str | None:
        return self.inner.fault

    @property
    def unreadable(self) -> dict[str, int]:
        return self.inner.unreadable

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Findings:
    """Results of a listening period.

    Attributes:
        heard: topic, or `camera_key` -> its messages.
        complete: share of control ticks, 0 to 1, at which there was an observation.
        state: the last observation's state (S,), or None. graph: who else is there; None where that cannot be seen.
        refused: camera or topic -> reason -> messages refused. errors: camera or topic -> what was wrong with the last.
        closed: camera of this machine -> why it could not be opened.
        load: programs that wanted a processor of this machine in the last minute, for each processor.
    """

    heard: dict[str, Heard]
    complete: float
    state: np.ndarray | None
    graph: list[Endpoint] | None
    refused: dict[str, dict[str, int]]
    errors: dict[str, str]
    fault: str | None
    closed: dict[str, str]
    load: float = 0.0


class _Closed:
    """Stands for a camera that could not be opened."""

    fault: str | None = None

    def close(self) -> None: ...


def camera_key(name: str) -> str:
    """Under which a camera without a topic is heard."""
    return f"camera {name}"


def listen(contract: RobotContract, transport: Transport, seconds: float) -> Findings:
    """Listen on a contract's topics for `seconds`, after at most as long for all of them to be heard once.

    Raises:
        TransportError: the contract names a topic or joint that the transport knows not to exist.
    """
    ear = ListeningTransport(transport)
    closed: dict[str, str] = {}

    def open_camera(name: str, config: CameraConfig, handler: Handler) -> Camera:
        try:
            return LocalCamera(name, config, ear.hearing(camera_key(name), handler))
        except TransportError as error:
            closed[name] = str(error)
            return _Closed()

    # Without actions nothing is advertised.
    robot = TopicRobot(contract.model_copy(update={"action": ()}), ear, open_camera=open_camera)
    try:
        return _listen(contract, transport, robot, ear, closed, seconds)
    finally:
        robot.close()


def _listen(
    contract: RobotContract,
    transport: Transport,
    robot: TopicRobot,
    ear: ListeningTransport,
    closed: dict[str, str],
    seconds: float,
) -> Findings:
    images = contract.observation.images.items()
    topics = {camera_key(name) if s.camera else s.topic for name, s in images if name not in closed}
    topics |= {s.topic for s in (*contract.observation.state, contract.safety.wrench) if s is not None}
    deadline = time.monotonic() + seconds
    while topics - set(ear.heard) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(SETTLE)
    ear.forget()
    ticks, complete, state = 0, 0, None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(1 / contract.rate)
        ticks += 1
        if (observation := robot.read()) is not None:
            complete, state = complete + 1, observation.state
    return Findings(
        heard=dict(ear.heard),
        complete=complete / max(ticks, 1),
        state=state,
        graph=transport.survey() if isinstance(transport, Surveyor) else None,
        refused=robot.dropped,
        errors=robot.last_errors,
        fault=transport.fault,
        closed=closed,
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
    )
