"""Queue of robots that hold and ask for help: whom one person helps next.

The order is that of `since - head_start * urgency`, the smallest first: who has waited longest, where a robot whose
failure score stands far above its threshold counts as if it had waited up to `head_start` seconds longer. Both are
fixed when a robot asks, so the order of two robots never changes while they wait, and nobody starves: only those that
ask within `head_start` seconds after a robot can come before it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

HEAD_START = 30.0  # seconds
Event = Callable[..., None]


class HelpError(ValueError):
    """Something that the queue does not allow now; the message says why."""


@dataclass(frozen=True)
class Request:
    """A robot that holds until somebody comes.

    Attributes:
        since: when it began to hold, seconds on the queue's clock; what it had waited before is taken off, where the
            person left before it was helped. asked: when this wait began. reason: why, for the person.
        score, threshold: of the failure detector when it asked; None without one.
    """

    robot: str
    since: float
    asked: float
    reason: str = ""
    score: float | None = None
    threshold: float | None = None

    @property
    def urgency(self) -> float:
        """How far the score is above its threshold, as a share of the threshold, in [0, 1]; 0 without a score."""
        if self.score is None or self.threshold is None or not self.score > self.threshold:
            return 0.0
        if self.threshold <= 0 or math.isinf(self.score):
            return 1.0
        return min(1.0, self.score / self.threshold - 1)


@dataclass(frozen=True)
class Help:
    """The person with a robot. `since`: seconds on the queue's clock; `request`: None where the robot had not asked."""

    robot: str
    who: str
    since: float
    request: Request | None


class HelpQueue:
    """See the module. From any thread.

    Args:
        head_start: seconds.
        clock: monotonic seconds.
        on_event: called within the lock with `(event, robot=..., ...)` at each change: "asked", "withdrawn" (with
            `waited`), "helping" (`who`, `waited`), "handed_back" (`who`, `helped`, `why`); seconds. Must be quick.
    """

    def __init__(
        self,
        head_start: float = HEAD_START,
        clock: Callable[[], float] = time.monotonic,
        on_event: Event = lambda event, **fields: None,
    ) -> None:
        if not (math.isfinite(head_start) and head_start >= 0):
            raise ValueError(f"head_start: got {head_start}; allowed: 0 seconds or more")
        self._head_start, self._clock, self._on_event = head_start, clock, on_event
        self._lock = threading.RLock()
        self._waiting: dict[str, Request] = {}
        self._help: Help | None = None

    @property
    def help(self) -> Help | None:
        """Whom the person helps now; None: nobody."""
        return self._help

    def waiting(self) -> list[Request]:
        """Those that wait, in the order in which they are helped."""
        with self._lock:
            return sorted(self._waiting.values(), key=self._place)

    def _place(self, request: Request) -> tuple[float, float, str]:
        return request.since - self._head_start * request.urgency, request.since, request.robot

    def seconds_waited(self, request: Request) -> float:
        """Seconds of this wait."""
        return self._clock() - request.asked

    def ask(
        self, robot: str, reason: str = "", score: float | None = None, threshold: float | None = None
    ) -> Request | None:
        """The robot holds and wants help. One that waits already keeps its place; None for the one that is helped."""
        with self._lock:
            if self._help is not None and self._help.robot == robot:
                return None
            if robot not in self._waiting:
                now = self._clock()
                self._put(Request(robot, now, now, reason, score, threshold))
            return self._waiting[robot]

    def _put(self, request: Request) -> None:
        self._waiting[request.robot] = request
        told: dict[str, Any] = {"score": request.score, "threshold": request.threshold}
        self._on_event("asked", robot=request.robot, reason=request.reason, **told)

    def withdraw(self, robot: str, why: str = "") -> bool:
        """The robot needs no help any more, or is gone. False where it did not wait."""
        with self._lock:
            request = self._waiting.pop(robot, None)
            if request is not None:
                self._on_event("withdrawn", robot=robot, waited=self.seconds_waited(request), why=why)
            return request is not None

    def help_next(self, who: str) -> Help | None:
        """The person goes to the first in the queue; None where nobody waits.

        Raises:
            HelpError: the person is with a robot.
        """
        with self._lock:
            waiting = self.waiting()
            return self.help_robot(waiting[0].robot, who) if waiting else None

    def help_robot(self, robot: str, who: str) -> Help:
        """The person goes to this robot, whether it waits or not, and whatever its place.

        Raises:
            HelpError: the person is with a robot.
        """
        with self._lock:
            if self._help is not None:
                raise HelpError(f"{self._help.who} is with {self._help.robot}: hand it back first")
            request = self._waiting.pop(robot, None)
            self._help = Help(robot, who, self._clock(), request)
            waited = 0.0 if request is None else self.seconds_waited(request)
            self._on_event("helping", robot=robot, who=who, waited=waited, asked=request is not None)
            return self._help

    def hand_back(self, why: str = "", asks_again: bool = False) -> Help | None:
        """The person leaves the robot; None where there was none.

        Args:
            asks_again: it still needs help, as when the person's link is lost: it waits again, and what it waited
                before counts.
        """
        with self._lock:
            ended, self._help = self._help, None
            if ended is None:
                return None
            self._on_event("handed_back", robot=ended.robot, who=ended.who, helped=self._clock() - ended.since, why=why)
            if asks_again:
                now, before = self._clock(), ended.request
                if before is None:
                    self._put(Request(ended.robot, now, now, why))
                else:
                    since = now - (ended.since - before.since)
                    self._put(replace(before, since=since, asked=now, reason=why or before.reason))
            return ended
