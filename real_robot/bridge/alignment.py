"""Time alignment: the messages of one topic, kept until an observation asks for the one that belongs to it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from real_robot.contract.channels import AlignConfig
from real_robot.transports.messages import MessageError

CAPACITY = 64
LISTENING = 1.0  # seconds without another message after which a stream counts as silent, not as refused
MAX_LEAD = 0.1  # seconds that a header's stamp may lie in the future: what clocks of two machines may differ by


@dataclass(frozen=True)
class Sample:
    """A decoded message. `time`: seconds on the monotonic clock, by the topic's timeline; `arrival`: of its arrival."""

    value: np.ndarray
    time: float
    arrival: float


class HeaderClock:
    """Turns headers' wall-clock stamps into this process's monotonic time.

    The difference between the two clocks is taken once: when the wall clock then jumps, here or on
    the robot, messages fall out of their window and are refused, so that the robot holds. `reset`,
    after a person has looked, takes the difference anew.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], int] = time.time_ns) -> None:
        self._clock, self._wall = clock, wall
        self.reset()

    def reset(self) -> None:
        self._offset = self._wall() - round(self._clock() * 1e9)

    def to_monotonic(self, stamp: int) -> float:
        """Seconds on the monotonic clock of a header's stamp, ns since the epoch."""
        return (stamp - self._offset) / 1e9


class Track:
    """The newest messages of one topic, in order of time. Safe to fill from another thread.

    `dropped` counts what was refused, by reason: "stale", "future", "out of order", "unstamped" and
    "undecodable"; `last_error` says what was wrong with the last one.
    """

    def __init__(self, align: AlignConfig, max_age: float, header_clock: HeaderClock) -> None:
        self._align, self._max_age, self._header_clock = align, max_age, header_clock
        self._samples: deque[Sample] = deque(maxlen=CAPACITY)
        self._used = float("-inf")
        self._lock = threading.Lock()
        self.dropped: Counter[str] = Counter()
        self.last_error = ""
        self._refused_at = float("-inf")

    @property
    def has_age(self) -> bool:
        """Whether an observation is as old as this topic's message. Not with `hold`, which takes any age."""
        return self._align.strategy != "hold"

    def refuse(self, error: MessageError, arrival: float) -> None:
        """Count a message that cannot be decoded."""
        self._refuse("undecodable", str(error), arrival)

    def _refuse(self, reason: str, error: str, arrival: float) -> None:
        self.dropped[reason] += 1
        self.last_error, self._refused_at = error, arrival

    def time_of(self, stamp: int, arrival: float) -> float | None:
        """When a message with this header stamp, arrived then, happened; None (and counted) where it is refused."""
        if self._align.timeline == "receive":
            return arrival
        moment = self._header_clock.to_monotonic(stamp)
        newest = self._samples[-1].time if self._samples else float("-inf")
        reason = (
            "unstamped"
            if stamp == 0
            else "future"
            if moment > arrival + MAX_LEAD
            else "stale"
            if moment < arrival - self._max_age
            else "out of order"
            if moment <= newest
            else None
        )
        if reason is not None:
            self._refuse(reason, self._explain(reason, moment, arrival), arrival)
        return None if reason else moment

    def _explain(self, reason: str, moment: float, arrival: float) -> str:
        skew = f"stamped {moment - arrival:+.2f} s from this machine's clock"
        match reason:
            case "unstamped":
                return "its messages have no stamp; set the clock on the robot, or align.timeline: receive"
            case "future":
                return f"{skew}, at most {MAX_LEAD:+g} s is allowed; set both clocks together (chrony, ntp)"
            case "stale":
                return f"{skew}, at most {-self._max_age:+g} s (max_age) is allowed; a slow network, or a clock behind"
        return "its messages come out of order, or with the same stamp again"

    def add(self, sample: Sample) -> None:
        with self._lock:
            self._samples.append(sample)

    def newest(self) -> Sample | None:
        with self._lock:
            return self._samples[-1] if self._samples else None

    def trouble(self, now: float) -> str:
        """Why there is no message younger than `max_age`; empty where there is one."""
        newest = self.newest()
        if newest is not None and (newest.time >= now - self._max_age or not self.has_age):
            return ""
        heard = float("-inf") if newest is None else newest.arrival
        if self._refused_at > heard and now - self._refused_at <= max(self._max_age, LISTENING):
            return f"its messages are refused: {self.last_error}"
        heard = max(heard, self._refused_at)
        return "no message yet" if heard == float("-inf") else f"silent for {now - heard:.1f} s"

    def pick(self, reference: float) -> Sample | None:
        """The message that belongs to an observation of that time, by the strategy; None where there is none."""
        align = self._align
        with self._lock:
            if align.strategy == "hold":
                return self._samples[-1] if self._samples else None
            found = next((s for s in reversed(self._samples) if s.time <= reference), None)
            if found is None or found.time < reference - align.tolerance:
                return None
            if align.strategy == "drop" and found.time <= self._used:
                return None
            return found

    def use(self, sample: Sample) -> None:
        """Remember that an observation was made of it (for `drop`)."""
        self._used = sample.time

    def clear(self, before: float = float("inf")) -> None:
        """Forget messages older than `before`, seconds on the monotonic clock."""
        with self._lock:
            kept = [s for s in self._samples if s.time >= before]
            self._samples.clear()
            self._samples.extend(kept)
