"""Motion and state checks that plug into the supervisor: of commands, and of the robot's reports.

The supervisor asks each check at each tick, or observation, in the robot's process: a check must be quick, and must not
block. One that raises counts as one that found something: the robot holds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from real_robot.types import RobotObservation


@dataclass(frozen=True)
class Motion:
    """What is about to be sent at one tick, after all limits, and where the robot stands if it brakes from there.

    Attributes:
        values: float32 (A,), the numbers to be sent now, in the contract's order and units.
        way: float64 (A,), how far each number goes on if the robot brakes at the next tick. A position comes to rest
            at values + way. For a velocity it is the integral of the speed, from now until it is zero.
        observation: the newest one; its state is of up to `SafetyConfig.observation_timeout` seconds ago.
        tick: seconds between two ticks.
        moved_since: of a time (monotonic seconds) float64 (A,): the integral of each velocity that was sent since.
    """

    values: np.ndarray
    way: np.ndarray
    observation: RobotObservation
    tick: float
    moved_since: Callable[[float], np.ndarray]


class MotionCheck(Protocol):
    """Refuses motions, as into a collision. `name` is the rule's name in the log.

    It is asked about each motion that the supervisor would let through, not about braking. A refused motion is not
    sent: the robot brakes to a standstill, then the check is asked again about what is asked then. So refuse what
    cannot be braked in time: `values` + `way`, not `values` alone.
    """

    name: str

    def refuse(self, motion: Motion) -> str | None:
        """Why this must not be sent, for a person to read: what is too near, its value, the limit. None: it may."""
        ...


class StateCheck(Protocol):
    """Finds trouble in what the robot reports: a position that cannot be, an effort beyond its limit.

    `name` is the rule's name in the log. While there is trouble the robot holds; where it lasts, it stops.
    """

    name: str

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        """What is wrong, for a person to read: the stream or joint, its value, the limit. None: nothing.

        Args:
            observation: the newest one; each is shown once, in order.
            sent: float64 (A,), the values sent last; None while the robot's position is not known yet, and in a dry
                run.
        """
        ...

    def restart(self) -> None:
        """Forget earlier observations: a new episode, or a reset after a stop. The robot may have been moved."""
        ...


_NUMBER = re.compile(r"[-+]?\b\d[\d.]*(e[-+]?\d+)?")


def without_numbers(reason: str) -> str:
    """What reasons have in common that differ only in what was measured."""
    return _NUMBER.sub("#", reason)


def ask(name: str, question: Callable[[], str | None]) -> str | None:
    """A check's answer; that it failed, where it raises: a broken check must not let through what it is there for."""
    try:
        return question()
    except Exception as error:
        return f"the check {name} failed: {type(error).__name__}: {error}"


class Newest[T]:
    """Newest message of a topic that the checks alone read, and whether it is young enough.

    Args:
        topic, what: for messages, as in "/joint_states has not shown the joints yet".
    """

    def __init__(self, topic: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = f"{topic} has not shown {what}", clock
        self._lock = threading.Lock()
        self._shown: tuple[float, T] | None = None
        self._fault = ""

    def show(self, value: T) -> None:
        """A message that can be used has arrived now."""
        with self._lock:
            self._shown, self._fault = (self._clock(), value), ""

    def refuse(self, fault: str) -> None:
        """A message that cannot be used has arrived; it counts as none."""
        with self._lock:
            self._fault = fault

    def get(self) -> tuple[float, T] | None:
        """When the last one arrived, in monotonic seconds, and what it was; None before the first."""
        with self._lock:
            return self._shown

    def trouble(self, limit: float) -> str | None:
        """Why what it shows is not known: nothing in `limit` seconds; or None."""
        with self._lock:
            shown, why = self._shown, f": {self._fault}" if self._fault else ""
        if shown is None:
            return f"{self._name} yet{why}"
        if not 0 <= self._clock() - shown[0] <= limit:
            return f"{self._name} for {limit:g} s{why}"
        return None


class Patience:
    """Timer of intermittent trouble: forgotten once there was none for as long as the limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: float | None = None
        self._last = 0.0

    def forget(self) -> None:
        """Begin anew."""
        self._since = None

    def is_over(self, now: float, trouble: bool) -> bool:
        """Whether there is trouble now, and has been for the limit's seconds."""
        if trouble:
            self._since = now if self._since is None else self._since
            self._last = now
            return now - self._since >= self._limit
        if now - self._last >= self._limit:
            self._since = None
        return False
