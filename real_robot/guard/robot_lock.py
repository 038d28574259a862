"""Exclusive lock on a robot, over its graph: who claims it says so there, and asks who is there.

    lock = RobotLock(transport, lease, publishes=[...])
    lock.acquire(say)                       # or RobotBusyError, which names the first
    ... Operators([lock, ...]), observers=[..., lock]
    lock.close()

Each process repeats its `Lease` five times a second. One that claims a robot gets it when the graph has had time to
find everybody, all whom it knows have been heard, nobody holds it, all others that claim it too have yielded to the
smallest id, and no other process of this machine has it (`claim_host`). A process that is no longer heard has lost its
lease after `EXPIRY`, and knows that itself. Should two hold a robot all the same, as after a network was cut in two,
the younger one `is_silent` from then on, and ends. Stops and resets by people travel the same way: the newest counts,
and at one place stops all.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.transports.base import Graph, GraphConnection, QosConfig, Transport, TransportError
from real_robot.transports.messages import Message, String
from real_robot.types import RobotObservation
from vla_rl.config import Config

TOPIC = "/vla_rl/drivers"  # std_msgs/String, JSON
Role = Literal["deploy", "guarded deploy", "robot guard"]
TOGETHER = {"guarded deploy", "robot guard"}  # the only two that may have one robot
_log = logging.getLogger(__name__)
SUFFIX = "/guarded"  # of each action topic, for the commands to the guard
PERIOD = 0.2  # seconds between two words
EXPIRY = 2.0  # seconds of silence after which a lease is void
PATIENCE = 15.0  # seconds for a dead process to vanish from the graph, after all was found: DDS needs 10
LISTEN = 2.5 * PERIOD  # seconds of silence, after it stood still, in which whoever took the robot is heard
QOS = QosConfig(depth=50)


class Lease(Config):
    """One process' word, repeated several times a second."""

    id: str = Field(max_length=80, description="Of the process; the smaller of two that claim a robot at once wins.")
    role: Role = Field(description="What the process is.")
    state: Literal["claims", "yields", "holds", "leaves"] = Field(description="How far it has come.")
    robot: str = Field(max_length=200, description="The robot's name in its contract.")
    topics: tuple[str, ...] = Field(max_length=256, description="The topics of the robot's driver that it means.")
    host: str = Field(max_length=300, description="Its machine.")
    pid: int = Field(description="Its process id there.")
    since: float = Field(description="When it started, seconds since the epoch by its clock.")
    epoch: int = Field(default=0, ge=0, description="Counts the stops and resets that people made; the newest is true.")
    stopped: str = Field(default="", max_length=1000, description="Why the robot is stopped, by a person; empty: not.")

    def excludes(self, other: Lease) -> bool:
        """Whether the two may not drive at once."""
        return self.is_of(other) and {self.role, other.role} != TOGETHER

    def is_of(self, other: Lease) -> bool:
        """Whether the two mean the same robot, or parts of one."""
        return bool(set(self.topics) & set(other.topics))

    def describe(self) -> str:
        """Who this is, for people."""
        since = datetime.datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"vla-rl {self.role.removeprefix('guarded ')} on {self.host}, process {self.pid}, since {since}"


def new_lease(role: Role, robot: str, topics: Iterable[str]) -> Lease:
    """The lease with which this process begins."""
    return Lease(
        id=f"{time.time_ns():020d} {uuid.uuid4().hex}",
        role=role,
        state="claims",
        robot=robot[:200],
        topics=tuple(f"/{topic.lstrip('/')}" for topic in topics),
        host=socket.gethostname()[:300],
        pid=os.getpid(),
        since=time.time(),
    )


def read_lease(text: str) -> Lease | None:
    """The lease in a message; None where it is none."""
    try:
        return Lease.model_validate_json(text)
    except (ValidationError, ValueError):
        return None


class RobotBusyError(TransportError):
    """Another process drives the robot; the message names it."""


def claim_host(graph: str, lease: Lease) -> ExitStack | None:
    """Claim a robot on this machine, until the process ends or the stack closes; None where another process has it.

    The system's own names of sockets (Linux; elsewhere nothing is claimed): no graph has to find anybody for it.
    """
    parts = {"deploy": "dc", "robot guard": "d", "guarded deploy": "c"}[lease.role]  # the driver's topics, commands
    with ExitStack() as stack:
        for name in [f"{graph} {part} {topic}" for topic in lease.topics for part in parts]:
            claimed = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claimed.bind(f"\0vla_rl {hashlib.sha256(name.encode()).hexdigest()}")
            except FileNotFoundError:  # a system without such names
                pass
            except OSError:
                return None
        return stack.pop_all()


@dataclass(frozen=True)
class _Heard:
    lease: Lease
    time: float


class RobotLock:
    """See the module. An operator of the control loop (others' stops and resets), and an observer (one's own).

    Args:
        transport: the robot's graph.
        lease: whom this process is, and which topics of the robot's driver it means (`new_lease`).
        publishes: the topics that it will publish itself, on which nobody else may be found.
        others: nodes that may be found there all the same; "*" for any.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: Graph,
        lease: Lease,
        publishes: Sequence[str],
        others: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._lease, self._publishes, self._others = transport, lease, list(publishes), set(others)
        self._clock = clock
        self._ids = {lease.id}  # all that this process has had: its own words may come back late
        self._news = threading.Condition(threading.RLock())
        self._heard: dict[str, _Heard] = {}
        self._told = clock()  # when this process last said that it is there
        self._lost = ""
        self._rival = ""  # who drives in this one's place, once that is known
        self._silent_until = -math.inf
        self._host: ExitStack | None = None
        self._stop: str | None = None  # by a person elsewhere, for the next tick
        self._reset: str | None = None
        self._passed: set[str] = set()  # what `poll` has given, which is not to be told on
        self._closing = threading.Event()
        self._publish = transport.advertise(TOPIC, String, QOS)
        transport.subscribe(TOPIC, String, QOS, self._receive)
        self._thread = threading.Thread(target=self._repeat, name="robot lock", daemon=True)
        self._thread.start()

    # --- on the graph ---------------------------------------------------------------------------

    def _tell(self, **changes: object) -> None:
        with self._news:
            self._lease = self._lease.model_copy(update=changes)
            text = self._lease.model_dump_json()
        self._publish(String(data=text))
        self._told = self._clock()

    def _repeat(self) -> None:
        while not self._closing.wait(PERIOD):
            self._check_gap()
            self._tell()

    def _receive(self, message: Message) -> None:
        assert isinstance(message, String)
        lease = read_lease(message.data)
        if lease is None or lease.id in self._ids:
            return
        with self._news:
            self._heard.pop(lease.id, None)
            if lease.state != "leaves":
                self._heard[lease.id] = _Heard(lease, self._clock())
            if lease.is_of(self._lease):
                self._adopt(lease)
            self._news.notify_all()

    def _adopt(self, lease: Lease) -> None:
        """Take a newer stop or reset. Of two at once, the stop."""
        ours = self._lease
        if (lease.epoch, bool(lease.stopped)) <= (ours.epoch, bool(ours.stopped)):
            return
        self._lease = ours.model_copy(update={"epoch": lease.epoch, "stopped": lease.stopped})
        by = f"{lease.stopped or 'reset'}, at {lease.describe()}"
        self._stop, self._reset = (by, None) if lease.stopped else (None, by)

    def _alive(self) -> list[Lease]:
        """All that were heard of late, this robot's or not."""
        oldest = self._clock() - EXPIRY
        with self._news:
            self._heard = {id: heard for id, heard in self._heard.items() if heard.time >= oldest}
            return [heard.lease for heard in self._heard.values()]

    # --- to claim it -----------------------------------------------------------------------------

    def acquire(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Claim the robot; returns when it is ours.

        Raises:
            RobotBusyError: another process has it, another node publishes on its topics, or does not answer.
            TransportError: the robot's guard, which must be there, is not.
        """
        begun, waits_for = self._clock(), ""
        settle = float(getattr(self._transport, "discovery", GraphConnection.discovery))
        self._tell()
        while True:
            members = self._transport.other_publishers(TOPIC) or []  # first: the answer may take long
            alive = self._alive()
            rivals = [lease for lease in alive if lease.excludes(self._lease)]
            holder = next((lease for lease in rivals if lease.state == "holds"), None)
            if holder is not None:
                self.close()
                raise RobotBusyError(
                    f"{self._lease.robot} is driven already ({holder.topics[0]}), by {holder.describe()}. "
                    f"End that first{self._hint(holder)}"
                )
            state = "yields" if any(r.state != "yields" and r.id < self._lease.id for r in rivals) else "claims"
            if state != self._lease.state:
                self._tell(state=state)
            trouble = self._trouble(rivals, members if len(members) > len(alive) else [])
            now = self._clock()
            if not trouble and state == "claims" and now - begun >= settle:
                self._host = claim_host(getattr(self._transport, "graph", self._lease.id), self._lease)
                if self._host is not None:
                    self._tell(state="holds")
                    return
                trouble = "another process of this machine drives it, but is not heard"
            if now - begun > settle + PATIENCE:
                self.close()
                raise RobotBusyError(f"{self._lease.robot}: {trouble or 'another process claims it'}")
            if trouble and trouble != waits_for and now - begun >= settle:
                say(f"waiting: {trouble}")
                waits_for = trouble
            with self._news:
                self._news.wait(PERIOD / 2)

    def _hint(self, holder: Lease) -> str:
        is_guarded = holder.role == "robot guard" and self._lease.role == "deploy"
        return ", or give --guarded to drive through it" if is_guarded else ""

    def _trouble(self, rivals: list[Lease], unheard: list[str]) -> str:
        """Why the robot cannot be held yet."""
        if undecided := [r for r in rivals if r.state != "yields"]:
            return f"claimed at the same time by {undecided[0].describe()}"
        if self._needs_guard():
            return (
                "no vla-rl robot guard of these topics is heard; start `vla-rl robot guard` with this contract beside "
                "the robot's driver, or leave --guarded out"
            )
        if unheard:
            return f"{', '.join(unheard)} announces a driver on {TOPIC}, but is not heard: it hangs, or is gone"
        if "*" in self._others:
            return ""
        for topic in self._publishes:
            if strangers := set(self._transport.other_publishers(topic) or ()) - self._others:
                return (
                    f"{topic} has another publisher, {', '.join(sorted(strangers))}; end it, or name it in the "
                    "contract's other_publishers"
                )
        return ""

    def _needs_guard(self) -> bool:
        if self._lease.role != "guarded deploy":
            return False
        guards = [lease for lease in self._alive() if lease.role == "robot guard" and lease.is_of(self._lease)]
        return not any(guard.state == "holds" for guard in guards)

    # --- while it is held -------------------------------------------------------------------------

    def _check_gap(self) -> None:
        """Whether this process stood still for so long that others may have taken its lease for void."""
        gap = self._clock() - self._told
        if gap > EXPIRY and not self._lost:
            self._lost = f"this process stood still for {gap:.1f} s, and another may have taken the robot"
            self._told = self._clock()
            self._silent_until = self._told + LISTEN
            with self._news:  # the younger of two that hold it
                self._lease = self._lease.model_copy(update={"id": new_lease("deploy", "", ()).id})
                self._ids.add(self._lease.id)

    @property
    def is_silent(self) -> bool:
        """Nothing may be sent, not even zeros: another process drives the robot, or may do so."""
        return bool(self._rival) or self._clock() < self._silent_until

    def check_held(self) -> None:
        """
        Raises:
            RobotBusyError: another process has driven the robot in this one's place.
        """
        if self._rival:
            raise RobotBusyError(f"{self._lease.robot}: {self._rival}; this process sends nothing any more")

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """Stops and resets by people elsewhere; a stop while the robot is not ours alone, and the end for the younger
        of two that drive it."""
        self._check_gap()
        with self._news:
            (stop, self._stop), (reset, self._reset) = (self._stop, None), (self._reset, None)
            lost, self._lost = self._lost or None, ""
        older = [r for r in self._alive() if r.excludes(self._lease) and r.state == "holds" and r.id < self._lease.id]
        if older:
            self._rival = stop = f"another driver: {older[0].describe()}"
        elif self._needs_guard():
            stop = "the robot's guard is gone"
        stop = lost or stop
        self._passed = {text for text in (stop, reset) if text}
        return OperatorCommand(stop=stop, reset=None if stop else reset, finished=bool(self._rival))

    def __call__(self, tick: Tick) -> None:
        """Pass on what a person has done here."""
        done = tick.operator_command
        if done.stop is not None and done.stop not in self._passed:
            self.stop_all(done.stop)
        if done.reset is not None and done.reset not in self._passed:
            self._tell(epoch=self._lease.epoch + 1, stopped="")

    def stop_all(self, reason: str) -> None:
        """Have the robot's other processes stop, until a reset at one of them."""
        if not self._lease.stopped:
            self._tell(epoch=self._lease.epoch + 1, stopped=reason[:1000])

    def close(self) -> None:
        """Give the robot back. May be called twice."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(2 * PERIOD)
            self._tell(state="leaves")
            if self._host is not None:
                self._host.close()


def claim(
    contract: RobotContract, transport: Transport, role: Role, say: Callable[[str], None], stack: ExitStack
) -> RobotLock | None:
    """The robot's lock, held until `stack` closes; None where the transport is no graph.

    Raises:
        RobotBusyError: another process drives the robot. TransportError: the robot's guard is not there.
    """
    if not isinstance(transport, Graph):
        return None
    topics = [sink.topic for sink in contract.action]
    suffix = SUFFIX if role == "guarded deploy" else ""
    publishes = [topic + suffix for topic in topics]
    lock = RobotLock(transport, new_lease(role, contract.name, topics), publishes, contract.other_publishers)
    stack.callback(lock.close)
    lock.acquire(say)
    return lock
