"""Jerk-limited motion of one set-point: bounded speed, acceleration and jerk, and it can always stop in time.

The set-point follows a path whose jerk, at every instant, is within bounds, and is looked at when a tick comes: so
differences between sent values keep all bounds, however long the ticks are. Two paths lead from a state through a
tick: the one that brakes to a standstill as quickly as the bounds allow, and the one that pushes towards the goal.
Any blend of the two keeps the bounds too, since they are convex. `Path.step` takes as much of the push as still
lets the set-point stand at its goal; none of it, at worst, and then stopping is as far off as it was before. So a
set-point whose standstill was within its limits stays within them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

HALVINGS = 12  # of the interval in which the share of the push is sought
TOLERANCE = 1e-9  # of rounding, relative


class Motion1D(NamedTuple):
    """Position, speed and acceleration of one set-point."""

    position: float
    speed: float = 0.0
    acceleration: float = 0.0


class Extent(NamedTuple):
    """The lowest and highest position on the way to a standstill, and the standstill, relative to the present one."""

    lowest: float
    highest: float
    end: float


@dataclass(frozen=True)
class Bounds:
    """What a path keeps: `acceleration` and `jerk` are finite and above zero, `speed` may be infinite."""

    speed: float
    acceleration: float
    jerk: float

    def braking(self, speed: float, acceleration: float) -> list[tuple[float, float]]:
        """Phases (jerk, seconds) that bring speed and acceleration to zero as quickly as the bounds allow."""
        left = speed + acceleration * abs(acceleration) / (2 * self.jerk)  # speed when acceleration is let go at once
        sign = 1.0 if left > 0 else -1.0
        v, a, most, jerk = sign * speed, sign * acceleration, self.acceleration, self.jerk
        if left == 0:
            return [(-math.copysign(jerk, acceleration), abs(acceleration) / jerk)]
        if a < -most:  # braked harder before: let go of what is too much
            phases = [(jerk, (-a - most) / jerk), (0.0, abs(left) / most), (jerk, most / jerk)]
        else:
            peak = min(most, math.sqrt(max(0.0, jerk * v + a * a / 2)))
            hold = max(0.0, v + (a * a / 2 - peak * peak) / jerk) / peak if peak == most else 0.0
            phases = [(-jerk, max(0.0, a + peak) / jerk), (0.0, hold), (jerk, peak / jerk)]
        return [(sign * j, seconds) for j, seconds in phases]

    def extent(self, speed: float, acceleration: float) -> Extent:
        """Where braking from this speed and acceleration leads."""
        position, v, a = 0.0, speed, acceleration
        for jerk, seconds in self.braking(speed, acceleration):
            position, v, a = _go(position, v, a, jerk, seconds)
        turn = 0.0
        left = speed + acceleration * abs(acceleration) / (2 * self.jerk)
        if speed * left < 0:  # it turns on the way
            sign = 1.0 if left > 0 else -1.0
            v, a = sign * speed, sign * acceleration
            seconds = (a - math.sqrt(max(0.0, a * a + 2 * self.jerk * v))) / self.jerk
            turn = sign * _go(0.0, v, a, -self.jerk, seconds)[0]
        return Extent(min(0.0, turn, position), max(0.0, turn, position), position)

    def pushing(self, acceleration: float, sign: float) -> list[tuple[float, float]]:
        """Phases (jerk, seconds) of the hardest push in a direction, without an end."""
        wanted = sign * self.acceleration
        ramp = math.copysign(self.jerk, wanted - acceleration)
        return [(ramp, abs(wanted - acceleration) / self.jerk), (0.0, math.inf)]

    def allows(self, motion: Motion1D, low: float, high: float) -> bool:
        """Whether these bounds can take over: nothing is beyond them, and a standstill within low..high is in reach."""
        position, speed, acceleration = motion
        slack = TOLERANCE * (1 + abs(low) + abs(high))
        if abs(acceleration) > self.acceleration * (1 + TOLERANCE) or self._peak(speed, acceleration) > self.speed:
            return False
        extent = self.extent(speed, acceleration)
        return position + extent.lowest >= low - slack and position + extent.highest <= high + slack

    def _peak(self, speed: float, acceleration: float) -> float:
        """The highest speed, less rounding, that letting go of the acceleration leads to."""
        peak = max(abs(speed), abs(speed + acceleration * abs(acceleration) / (2 * self.jerk)))
        return peak * (1 - TOLERANCE)

    def brake(self, motion: Motion1D, dt: float) -> Motion1D:
        """The motion `dt` seconds on, braking. At a standstill speed and acceleration are exactly zero."""
        phases = self.braking(motion.speed, motion.acceleration)
        after = _follow(motion, phases, dt)
        if sum(seconds for _, seconds in phases) <= dt * (1 + TOLERANCE):
            return Motion1D(after.position)
        return after

    def step(self, motion: Motion1D, goal: float, dt: float) -> Motion1D:
        """The motion `dt` seconds on, towards the goal, so that it can still stand there."""
        braked = self.brake(motion, dt)
        extent = self.extent(motion.speed, motion.acceleration)
        sign = 1.0 if goal >= motion.position + extent.end else -1.0
        farthest = max(sign * goal, sign * motion.position + (extent.highest if sign > 0 else -extent.lowest))
        pushed = _follow(motion, self.pushing(motion.acceleration, sign), dt)

        def fits(there: Motion1D) -> bool:
            way = abs(there.position - motion.position) * (1 - TOLERANCE)
            if way > self.speed * dt or self._peak(there.speed, there.acceleration) > self.speed:
                return False
            beyond = self.extent(there.speed, there.acceleration)
            return sign * there.position + (beyond.highest if sign > 0 else -beyond.lowest) <= farthest

        if fits(pushed):
            return pushed
        least, most, best = 0.0, 1.0, braked
        for _ in range(HALVINGS):
            share = (least + most) / 2
            there = Motion1D(*(one + share * (two - one) for one, two in zip(braked, pushed, strict=True)))
            if fits(there):
                least, best = share, there
            else:
                most = share
        return best


def _go(position: float, speed: float, acceleration: float, jerk: float, t: float) -> tuple[float, float, float]:
    """Constant jerk for t seconds."""
    return (
        position + t * (speed + t * (acceleration / 2 + t * jerk / 6)),
        speed + t * (acceleration + t * jerk / 2),
        acceleration + t * jerk,
    )


def _follow(motion: Motion1D, phases: list[tuple[float, float]], dt: float) -> Motion1D:
    """The motion `dt` seconds on along phases; at rest after their end."""
    state: tuple[float, float, float] = motion
    for jerk, seconds in phases:
        t = min(seconds, dt)
        state = _go(*state, jerk, t)
        dt -= t
        if dt <= 0:
            break
    return Motion1D(*state)
