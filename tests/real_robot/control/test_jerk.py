"""Motion with bounded jerk: at any ticks, with any goals and stops, differences of the positions keep the bounds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sent_checker import Checker, difference

from real_robot.contract.load import load_contract
from real_robot.control.jerk import Bounds, Motion1D
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
