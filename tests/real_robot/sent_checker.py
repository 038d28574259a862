"""A judge of what a supervisor sends: it knows the limits, and looks at times and sent values alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from real_robot.contract.safety import DimensionLimits, SafetyConfig
from real_robot.control.supervisor import SentCommand

RUNNING_FREELY = "running"


class Checker:
    """Looks at (time, sent) pairs, and remembers what limits need: the last values, speeds and accelerations.

    Args:
        last: float64 (A,), where the robot begins, at rest.
    """

    def __init__(self, config: SafetyConfig, last: np.ndarray) -> None:
        self.config, self.last = config, last
        self.tick = 1 / config.control_hz
        self.time: float | None = None
        self.rate = np.zeros(len(last))  # of change, at the last tick
        self.shortest = self.tick
        self.moved = 0.0  # seconds of motion so far
        self.paths: list[deque[tuple[float, float, bool]]] = [deque() for _ in last]  # (time, value, usual limits hold)
        self.jerk = np.zeros(len(last))  # the highest seen, of each number, as a share of its limit
        self.num_hard = 0  # brakings that were harder than the limits, as the workspace may ask for
        self._stand()

    def _stand(self) -> None:
        for path, value in zip(self.paths, self.last, strict=True):
            path.clear()
            path.extend((self.moved - k * self.tick, float(value), True) for k in (3, 2, 1, 0))
        self.rate[:] = 0.0

    def see(self, now: float, sent: SentCommand) -> None:
        """Judge one tick.

        Raises:
            AssertionError: a limit was not kept; the message says which.
        """
        gap = self.tick if self.time is None else now - self.time
        self.time = now
        if sent.values is None:
            return
        assert sent.values.dtype == np.float32 and np.isfinite(sent.values).all()
        values = sent.values.astype(np.float64)
        dt = min(max(gap, 0.0), self.tick)
        if gap > 2 * self.tick:
            self._stand()
        self.moved += dt
        for i, limits in enumerate(self.config.dimensions):
            low, high = self._bounds(i)
            assert low <= values[i] <= high, f"{limits.name}: {values[i]} outside {low}..{high}"
            if limits.kind == "velocity":
                self._check_velocity(i, values[i], dt, gap, sent)
            else:
                self._check_position(i, values[i], dt, sent)
        self.shortest = dt if dt > 0.001 else self.shortest
        self.last = values

    def _bounds(self, i: int) -> tuple[float, float]:
        limits, box = self.config.dimensions[i], self.config.workspace
        if limits.kind == "position" and box is not None and box.commands is not None and i in box.commands:
            axis = box.commands.index(i)
            return max(limits.low, box.low[axis]), min(limits.high, box.high[axis])
        return limits.low, limits.high

    def _check_velocity(self, i: int, value: float, dt: float, gap: float, sent: SentCommand) -> None:
        limits = self.config.dimensions[i]
        change, rounding = value - self.last[i], 4e-7 * max(1.0, abs(value))
        usual = is_usual(sent)
        acceleration, jerk = strongest(limits, usual)
        # The workspace, and a clock that stands still, may brake harder: towards zero, not beyond.
        brakes = abs(value) <= abs(self.last[i]) and value * self.last[i] >= 0
        harder = brakes and ("workspace" in sent.limited or (gap == 0 and sent.mode == "stopped"))
        change_allowed = acceleration * dt if acceleration < math.inf else math.inf
        allowed = min(change_allowed, limits.max_step or math.inf) + rounding
        # Where it was allowed more before, the jerk brings it back.
        relieved = abs(self.rate[i]) * dt - jerk * dt * dt + rounding if limits.max_jerk else 0.0
        is_soft = abs(change) <= max(allowed, relieved)
        assert is_soft or harder, f"{limits.name}: change {change} in {dt}"
        self.num_hard += not is_soft
        if limits.max_jerk is None:
            return
        if dt == 0 and change == 0:
            return
        if dt == 0 or harder:
            hardest = min(limits.stop_acceleration or acceleration, (limits.max_step or math.inf) / self.tick)
            self.rate[i] = np.clip(change / self.tick if dt == 0 else change / dt, -hardest, hardest)
            return
        rate = change / dt
        share = (abs(rate - self.rate[i]) - 2 * rounding / dt - 2 * rounding / max(1e-3, self.shortest)) / (jerk * dt)
        self.jerk[i] = max(self.jerk[i], share)
        assert share <= 1 + 1e-6 or dt < 0.001, f"{limits.name}: {share:.3f} of its jerk ({rate} after {self.rate[i]})"
        self.rate[i] = rate

    def _check_position(self, i: int, value: float, dt: float, sent: SentCommand) -> None:
        limits = self.config.dimensions[i]
        change, rounding = value - self.last[i], 4e-7 * max(1.0, abs(value))
        assert abs(change) <= (limits.max_step or math.inf) + rounding, f"{limits.name}: step {change}"
        fastest = min(limits.max_velocity or math.inf, (limits.max_step or math.inf) / self.tick)
        assert abs(change) <= fastest * dt + rounding, f"{limits.name}: {change} in {dt} s"
        if dt == 0:
            return
        if limits.max_jerk is not None:
            self._check_path(i, value, is_usual(sent))
            return
        speed = change / dt
        acceleration, _ = strongest(limits, is_usual(sent))
        if acceleration < math.inf and dt > 0.001:
            allowed = acceleration * dt + 2 * rounding / dt + 2 * rounding / max(1e-3, self.shortest)
            assert abs(speed - self.rate[i]) <= allowed, f"{limits.name}: {self.rate[i]} -> {speed} in {dt} s"
        self.rate[i] = speed

    def _check_path(self, i: int, value: float, usual: bool) -> None:
        """Differences of the last values: a path with bounded derivatives keeps them, whatever the times between."""
        limits, path = self.config.dimensions[i], self.paths[i]
        path.append((self.moved, value, usual))
        while len(path) > 4:
            path.popleft()
        for order, name, most in zip((2, 3), ("acceleration", "jerk"), (0, 1), strict=True):
            points = list(path)[-order - 1 :]
            limit = strongest(limits, all(is_free for _, _, is_free in points))[most]
            found, noise = difference([t for t, _, _ in points], [x for _, x, _ in points])
            share = (abs(found) - noise) / limit
            if order == 3:
                self.jerk[i] = max(self.jerk[i], share)
            assert share <= 1 + 1e-6, f"{limits.name}: {share:.3f} of its {name}: {points}"


def is_usual(sent: SentCommand) -> bool:
    """The usual limits hold, not those of braking."""
    return sent.mode == RUNNING_FREELY and "braking" not in sent.limited


def strongest(limits: DimensionLimits, usual: bool) -> tuple[float, float]:
    """(acceleration, jerk) that are allowed; infinite where there is no limit."""
    acceleration, jerk = limits.max_acceleration or math.inf, limits.max_jerk or math.inf
    return (acceleration, jerk) if usual else (limits.stop_acceleration or acceleration, limits.stop_jerk or jerk)


def difference(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The mean derivative, of the order of the number of points less one, and how much rounding there is in it."""
    found = noise = 0.0
    factor = math.factorial(len(times) - 1)
    for t, x in zip(times, values, strict=True):
        weight = factor / math.prod(t - other for other in times if other != t)
        found += weight * x
        noise += abs(weight) * (2e-7 * max(abs(x), 1e-3) + 1e-12)
    return found, noise
