"""Hold statistics: the share of time that the robot held, by cause."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from real_robot.checks import without_numbers
from real_robot.control.robot_loop import Tick
from real_robot.control.supervisor import HOLDING, STOPPED, Supervisor

WINDOW = 10.0  # seconds that a share is of
SHARE = 0.1  # of a window's ticks, below which a cause is not worth a line
AGAIN = 60.0  # seconds before a cause is told again


class HeldTicks:
    """An observer of the loop's ticks. A hold that a person or a failure detector asked for does not count.

    Args:
        warms_up: whether the policy still computes its very first actions; that is told at once.
        tell: a line for a person.
    """

    def __init__(self, supervisor: Supervisor, warms_up: Callable[[], bool], tell: Callable[[str], object]) -> None:
        self._supervisor, self._warms_up, self._tell = supervisor, warms_up, tell
        self._begun: float | None = None
        self._ticks = 0
        self._held: Counter[str] = Counter()
        self._words: dict[str, str] = {}  # the newest reason of each cause, with its numbers
        self._told: dict[str, float] = {}  # when
        self._is_warming = False

    def __call__(self, tick: Tick) -> None:
        wanted = tick.operator_command
        rests = not wanted.active or tick.sent is None or tick.sent.mode == STOPPED
        if rests or (wanted.command is not None and wanted.command.source == "hold"):
            return
        self._begun = tick.time if self._begun is None else self._begun
        self._ticks += 1
        if self._supervisor.state.mode == HOLDING:
            self._note(tick)
        if tick.time - self._begun >= WINDOW:
            self._tell_shares(tick.time)

    def _note(self, tick: Tick) -> None:
        reason = self._supervisor.state.reason
        if tick.requested is not None and tick.requested.source == "hold":
            is_warming = self._warms_up()
            if is_warming and not self._is_warming:
                self._tell("warming up: the policy computes its first actions; the robot begins by itself")
            self._is_warming = is_warming
            reason = "the policy warms up" if is_warming else "the policy had no action in time"
        cause = without_numbers(reason)
        self._held[cause] += 1
        self._words[cause] = reason

    def _tell_shares(self, now: float) -> None:
        for cause, number in self._held.most_common():
            share = number / self._ticks
            if share > SHARE and now - self._told.get(cause, -AGAIN) >= AGAIN:
                self._told[cause] = now
                self._tell(f"held {share:.0%} of {self._ticks} ticks: {self._words[cause]}")
        self._begun, self._ticks = None, 0
        self._held.clear()


class Repetition:
    """What was said three times of late is left to the shares of `HeldTicks`."""

    TIMES = 3

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said = clock, dict[str, list[float]]()

    def is_over(self, text: str) -> bool:
        """Note that something is to be said; whether it was said often enough."""
        now, key = self._clock(), without_numbers(text)
        said = [moment for moment in self._said.get(key, []) if now - moment < WINDOW]
        is_over = len(said) >= self.TIMES
        self._said[key] = said if is_over else [*said, now]
        return is_over
