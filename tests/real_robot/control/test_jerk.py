"""Motion with bounded jerk: at any ticks, with any goals and stops, differences of the positions keep the bounds.

`Expected` says what the bounds mean, by bisection and roots where the module has formulas. Small faults
(`scripts/mutant_draw.py`, every place and not a draw) that these tests leave in `control/jerk.py`, and why nobody can
see them:

- `left > 0` by `>=`, twice: where `left` is 0 its sign is not used; `sign > 0` by `>=`, twice: it is 1 or -1.
- `a < -most` by `<=`: where they are equal both branches give the same phases.
- `dt <= 0` by `<`: the phases that follow last no time.
- `>` and `>=`, `<` and `<=` for each other, where a rounding tolerance of 1e-9 is met to the last bit (eight times),
  and where a goal is where braking leads, to the last bit: either side may be taken then.
- The sign of the tolerance of a step's way, twice: a step is found to 1/4096 of the push.
- `strict=True` of `zip`: the lengths are equal by construction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from sent_checker import Checker, difference

from real_robot.contract.load import load_contract
from real_robot.control.jerk import HALVINGS, TOLERANCE, Bounds, Motion1D
from real_robot.control.supervisor import Supervisor
from real_robot.types import Command, RobotObservation

TICK = 0.05


def derivatives(times: list[float], positions: list[float], order: int) -> np.ndarray:
    """Mean derivatives of that order, at ticks of any length."""
    count = len(times) - order
    return np.array([difference(times[k : k + order + 1], positions[k : k + order + 1])[0] for k in range(count)])


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_limits_are_kept_whatever_is_asked(seed: int) -> None:
    r = random.Random(seed)
    usual = Bounds(10 ** r.uniform(-1, 2), 10 ** r.uniform(0, 2.5), 10 ** r.uniform(0.5, 4))
    hard = Bounds(usual.speed, usual.acceleration * r.choice([1, 2, 5]), usual.jerk * r.choice([1, 2, 10]))
    low, high = -1.0, r.choice([-0.98, 1.0, 50.0])
    holds_often, even = r.choice([0.0, 0.02, 0.3]), seed % 2 == 0
    motion, goal, holds = Motion1D(r.uniform(low, high)), low, False
    times, positions, free = [0.0], [motion.position], [True]
    for _ in range(300):
        if r.random() < 0.1:
            goal = r.choice([low, high, r.uniform(low, high)])
        holds = holds != (r.random() < holds_often)
        dt = TICK if even or r.random() < 0.6 else r.uniform(0.1, 1) * TICK
        brakes = holds or not usual.allows(motion, low, high)
        motion = hard.brake(motion, dt) if brakes else usual.step(motion, goal, dt)
        times.append(times[-1] + dt)
        positions.append(motion.position)
        free.append(not brakes)
    assert low - 1e-9 <= min(positions) and max(positions) <= high + 1e-9
    for order, name in ((1, "speed"), (2, "acceleration"), (3, "jerk")):
        found = np.abs(derivatives(times, positions, order))
        was_free = np.array([all(free[k + 1 : k + order + 1]) for k in range(len(found))])
        assert found.max() <= getattr(hard, name) * (1 + 1e-5), name
        assert (found[was_free] <= getattr(usual, name) * (1 + 1e-5)).all(), name


def test_it_gets_there_as_quickly_as_it_may_and_stays() -> None:
    bounds, motion, path = Bounds(60.0, 240.0, 2400.0), Motion1D(0.0), [0.0]
    for _ in range(70):
        motion = bounds.step(motion, 90.0, 1 / 30)
        path.append(motion.position)
    assert max(path) <= 90 + 1e-9 and path[-1] == pytest.approx(90, abs=1e-4)
    quickest = 90 / 60 + 60 / 240 + 240 / 2400
    assert next(k for k, x in enumerate(path) if x > 89.9) / 30 <= quickest + 2 / 30


@pytest.mark.parametrize(("speed", "acceleration"), [(3.0, 0.0), (3.0, 7.0), (3.0, -9.0), (-1.0, 9.0), (0.0, 5.0)])
def test_a_braking_ends_at_rest_where_it_was_said(speed: float, acceleration: float) -> None:
    bounds = Bounds(10.0, 4.0, 20.0)
    extent = bounds.extent(speed, acceleration)
    motion, path = Motion1D(0.0, speed, acceleration), [0.0]
    for _ in range(2000):
        motion = bounds.brake(motion, 0.003)
        path.append(motion.position)
    assert motion == (pytest.approx(extent.end), 0.0, 0.0)
    assert min(path) == pytest.approx(extent.lowest, abs=1e-4) and max(path) == pytest.approx(extent.highest, abs=1e-4)


def test_targets_that_alternate_shake_no_arm() -> None:
    """The SO-101's own limits: without a limit of its jerk this reached 14,400 degrees per second cubed."""
    config = load_contract("so101").safety
    now = 10.0
    supervisor = Supervisor(config, lambda: now)
    checker = Checker(config, np.full(6, 20.0))
    for k in range(300):
        now += 1 / config.control_hz
        supervisor.observe(RobotObservation({}, np.full(6, 20, np.float32), "", now))
        target = np.full(6, 30.0 if k // 2 % 2 else 10.0, np.float32)
        checker.see(now, supervisor.filter(Command(target, "policy", now)))
    assert (checker.jerk[:5] > 0.9).all(), "it is what limits this, else nothing was tested"
    assert (checker.jerk <= 1 + 1e-6).all()


# --- against the definitions --------------------------------------------------------------------

Phases = list[tuple[float, float]]


class Expected:
    def __init__(self, bounds: Bounds) -> None:
        self.speed, self.most, self.jerk = bounds.speed, bounds.acceleration, bounds.jerk

    def braking(self, v: float, a: float) -> Phases:
        """The acceleration goes to one that brakes, as far as it may, and from there to zero."""
        left = self.let_go(v, a)
        if left == 0:
            return [(-math.copysign(self.jerk, a), abs(a) / self.jerk)]
        sign = math.copysign(1.0, left)
        v, a = sign * v, sign * a

        def left_at(peak: float) -> float:
            return v + (a - peak) / 2 * abs(a + peak) / self.jerk - peak * peak / (2 * self.jerk)

        low, high = max(0.0, -a), self.most
        for _ in range(200 if a >= -self.most and left_at(high) < 0 else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if left_at(middle) > 0 else (low, middle)
        ramps = math.copysign(self.jerk, -high - a), abs(a + high) / self.jerk
        plateau = max(0.0, left_at(high)) / high if high == self.most else 0.0
        return [(sign * j, t) for j, t in (ramps, (0.0, plateau), (self.jerk, high / self.jerk))]

    def let_go(self, v: float, a: float) -> float:
        """The speed where the acceleration goes to zero at once."""
        return v + a / 2 * abs(a) / self.jerk

    def pushing(self, a: float, sign: float) -> Phases:
        away = sign * self.most - a
        return [(math.copysign(self.jerk, away), abs(away) / self.jerk), (0.0, 1e9)]

    def extremes(self, v: float, a: float) -> tuple[float, float, float]:
        """Lowest, highest and last position of a braking from 0."""
        state, ways = Motion1D(0.0, v, a), [0.0]
        for j, seconds in self.braking(v, a):
            turns = np.roots([j / 2, state.acceleration, state.speed])
            times = [float(t.real) for t in turns if abs(t.imag) < 1e-12 and 0 < t.real < seconds]
            ways += [after(state, [(j, seconds)], t).position for t in (*times, seconds)]
            state = after(state, [(j, seconds)], seconds)
        return min(ways), max(ways), state.position

    def step(self, motion: Motion1D, goal: float, dt: float) -> tuple[Motion1D, float]:
        """Where it is, and how near the search for it came to what decides."""
        lowest, highest, end = self.extremes(motion.speed, motion.acceleration)
        braked = np.array(after(motion, self.braking(motion.speed, motion.acceleration), dt))
        up = goal >= motion.position + end
        pushed = np.array(after(motion, self.pushing(motion.acceleration, 1.0 if up else -1.0), dt))
        to = max(goal, motion.position + highest) if up else min(goal, motion.position + lowest)
        margins = [abs(goal - motion.position - end)]

        def fits(there: np.ndarray) -> bool:
            position, v, a = map(float, there)
            low, high, _ = self.extremes(v, a)
            rooms = [
                self.speed * dt - abs(position - motion.position),
                self.speed - max(abs(v), abs(self.let_go(v, a))),
                to - position - high if up else position + low - to,
            ]
            margins.append(min(abs(room) for room in rooms))
            return min(rooms) >= 0

        share, width = (1.0, 0.0) if fits(pushed) else (0.0, 1.0)
        for _ in range(HALVINGS if width else 0):
            width /= 2
            share += width if fits(braked + (share + width) * (pushed - braked)) else 0.0
        return Motion1D(*map(float, braked + share * (pushed - braked))), min(margins)


def after(motion: Motion1D, phases: Phases, dt: float) -> Motion1D:
    """At rest after the phases; a mean of speeds by Simpson's rule, which is exact here."""
    position, v, a = motion
    for j, seconds in phases:
        t, dt = min(seconds, dt), max(0.0, dt - seconds)
        half, whole = v + t / 2 * (a + j * t / 4), v + t * (a + j * t / 2)
        position, v, a = position + t * (v + 4 * half + whole) / 6, whole, a + j * t
    return Motion1D(position, v, a)


def drawn(count: int, seed: int) -> Iterator[tuple[Bounds, Motion1D, random.Random]]:
    """Motions within the bounds' speed, some braked harder than the bounds allow, some letting go, some at rest."""
    r = random.Random(seed)
    for k in range(count):
        bounds = Bounds(10 ** r.uniform(-1, 1), 10 ** r.uniform(-1, 1.5), 10 ** r.uniform(0, 2.5))
        a = r.choice([r.uniform(-1, 1), r.uniform(-1, 1), 0.0, r.choice([-1.4, 1.4])]) * bounds.acceleration
        v = r.choice([r.uniform(-1, 1), r.uniform(-0.1, 0.1), 0.0 if a else 0.5]) * bounds.speed
        yield bounds, Motion1D(r.uniform(-1, 1) if k % 2 else 0.0, v, a), r


def test_a_braking_goes_as_defined_and_its_extent_is_that_of_its_path() -> None:
    for bounds, motion, r in drawn(800, 0):
        expected, state = Expected(bounds), f"{bounds} {motion}"
        phases = expected.braking(*motion[1:])
        total = sum(seconds for _, seconds in phases)
        assert bounds.extent(*motion[1:]) == pytest.approx(expected.extremes(*motion[1:]), rel=1e-7, abs=1e-9), state
        dt = total * r.uniform(0.0, 1.2)
        there = after(motion, phases, dt)
        assert bounds.brake(motion, dt) == pytest.approx(there, rel=1e-6, abs=1e-7), state
        last = bounds.brake(motion, sum(seconds for _, seconds in bounds.braking(*motion[1:])))
        assert last[1:] == (0.0, 0.0) and last.position == pytest.approx(there.position if dt >= total else last[0])


def test_what_comes_to_rest_by_letting_go_just_lets_go() -> None:
    bounds = Bounds(8.0, 4.0, 8.0)
    for sign in (1.0, -1.0):
        phases = [(sign * 8.0, 0.5)]
        assert bounds.braking(sign, -4.0 * sign) == phases == Expected(bounds).braking(sign, -4.0 * sign)
        assert bounds.extent(sign, -4.0 * sign) == pytest.approx((min(0.0, sign / 6), max(0.0, sign / 6), sign / 6))
    assert bounds.braking(0.0, 0.0)[0][1] == 0.0 and bounds.extent(0.0, 0.0) == (0.0, 0.0, 0.0)


def test_bounds_take_over_where_a_standstill_within_the_limits_is_in_reach() -> None:
    """Up to a rounding tolerance: 8e-9 for limits of -3 and 4."""
    bounds, low, high = Bounds(2.0, 4.0, 8.0), -3.0, 4.0
    slack = 8 * TOLERANCE
    for away, allowed in ((0.9 * slack, True), (1.1 * slack, False)):
        assert bounds.allows(Motion1D(high + away), low, high) is bounds.allows(Motion1D(low - away), low, high)
        assert bounds.allows(Motion1D(high + away), low, high) is allowed
    for sign in (1.0, -1.0):
        lowest, highest, _ = Expected(bounds).extremes(sign, 0.0)
        for away, allowed in ((0.9 * slack, True), (1.1 * slack, False)):
            assert bounds.allows(Motion1D(high - highest + away, sign), low, high) is allowed
            assert bounds.allows(Motion1D(low - lowest - away, sign), low, high) is allowed
        for beyond, allowed in ((1.0, True), (1 + 0.9 * TOLERANCE, True), (1 + 1.1 * TOLERANCE, False)):
            assert bounds.allows(Motion1D(0.0, 0.0, sign * 4.0 * beyond), -9.0, 9.0) is allowed
            assert bounds.allows(Motion1D(0.0, sign * 2.0 * beyond), -9.0, 9.0) is allowed
            letting_go = Motion1D(0.0, sign * (2.0 * beyond - 2.0 * 2.0 / 16), sign * 2.0)
            assert bounds.allows(letting_go, -9.0, 9.0) is allowed
        assert not bounds.allows(Motion1D(0.0, sign * 1.9, sign * 2.0), -9.0, 9.0), "it would get too fast"
        assert bounds.allows(Motion1D(0.0, sign * 1.9, sign * -2.0), -9.0, 9.0)


def test_a_step_takes_as_much_of_the_push_as_lets_it_stand_at_its_goal() -> None:
    shares = 0
    for bounds, motion, r in drawn(400, 1):
        dt, expected = r.choice([1.0, 0.3]) * min(1.0, bounds.acceleration / bounds.jerk), Expected(bounds)
        lowest, highest, end = expected.extremes(*motion[1:])
        reach = abs(end) + bounds.speed * dt
        way = r.choice([r.choice([-1, 1]) * reach * 10 ** r.uniform(-2, 1), r.uniform(lowest, highest)])
        goal = motion.position + way
        there, margin = expected.step(motion, goal, dt)
        if margin > 1e-9 * (1 + reach + bounds.speed):
            found = bounds.step(motion, goal, dt)
            assert found == pytest.approx(there, rel=1e-6, abs=1e-7), f"{bounds} {motion} {goal} {dt}"
            shares += 1
    assert shares > 300
