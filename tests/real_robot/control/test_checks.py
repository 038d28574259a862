"""Checks that plug into the supervisor: a refused motion brakes, trouble holds and then stops. What else holds it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from test_supervisor import JOINT, TICK, TWIST, Bench

from real_robot.checks import Motion, Patience
from real_robot.control.supervisor import Supervisor
from real_robot.types import RobotObservation


class Wall:
    """A wall at `place`: a joint must be able to stand before it."""

    name = "wall"

    def __init__(self, place: float) -> None:
        self.place = place
        self.seen: list[Motion] = []

    def refuse(self, motion: Motion) -> str | None:
        self.seen.append(motion)
        rest = motion.values[0] + motion.way[0]
        return f"j would stand at {rest:.3f}, beyond {self.place}" if rest > self.place else None


class Effort:
    """An effort limit on the second number of the state."""

    name = "effort"

    def __init__(self) -> None:
        self.restarts = 0

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        effort = float(observation.state[1])
        return f"effort {effort:g} is above 5" if effort > 5 else None

    def restart(self) -> None:
        self.restarts += 1


class Broken:
    """A check that raises."""

    name = "broken"

    def refuse(self, motion: Motion) -> str | None:
        raise KeyError("elbow")


def checked(dimension: dict, **checks: list) -> Bench:
    bench = Bench(dimension)
    bench.supervisor = Supervisor(bench.supervisor.config, lambda: bench.now, bench.events.append, **checks)
    return bench


def test_a_refused_motion_brakes_and_is_asked_about_again_at_standstill() -> None:
    wall = Wall(0.5)
    bench = checked(JOINT, motion_checks=[wall])
    path = [bench.sent(0.9)[0] for _ in range(60)]
    assert max(path) <= 0.5 and path[-1] > 0.35
    speed = np.diff(path) / TICK
    assert np.abs(np.diff(speed)).max() <= 2.0 * TICK + 1e-4, "it brakes within its limits"
    reasons = [event.text for event in bench.events if "j would stand at" in event.text]
    assert reasons and len(reasons) < 20, "told when it changes, not at each tick"
    assert "wall" in {rule for _ in range(30) for rule in bench.tick(0.9).limited}
    assert bench.tick(0.0).mode == "running", "the way back is open"


def test_the_way_is_where_it_comes_to_rest() -> None:
    wall = Wall(9.0)
    bench = checked(JOINT, motion_checks=[wall])
    for _ in range(8):
        bench.tick(0.9)
    motion = wall.seen[-1]
    rest = [bench.sent(0.9, source="hold")[0] for _ in range(20)][-1]
    assert motion.values[0] < rest <= motion.values[0] + motion.way[0] + 1e-6
    wall.seen.clear()
    bench.supervisor.stop("test")
    bench.tick(0.9)
    assert not wall.seen, "braking needs no leave"


def test_the_way_of_a_velocity_is_its_integral() -> None:
    wall = Wall(9.0)
    bench = checked(TWIST, motion_checks=[wall])
    for _ in range(8):
        bench.tick(0.2)
    bench.supervisor.stop("test")
    further = sum(bench.sent()[0] for _ in range(10)) * TICK
    assert 0.2 * TICK + further <= wall.seen[-1].way[0] + 1e-9 <= 0.2 * TICK + further + 0.01


def test_a_check_that_fails_lets_nothing_through() -> None:
    bench = checked(TWIST, motion_checks=[Broken()])
    sent = bench.tick(0.2)
    assert sent.mode == "holding" and sent.values == 0 and "broken" in sent.limited
    assert bench.supervisor.state.reason == "the check broken failed: KeyError: 'elbow'"


def test_trouble_holds_and_stops_where_it_lasts() -> None:
    effort = Effort()
    bench = checked(TWIST, state_checks=[effort])
    assert bench.tick(0.1).mode == "running"
    bench.state[1] = 7
    assert bench.tick(0.1).mode == "holding" and bench.supervisor.state.reason == "effort 7 is above 5"
    bench.state[1] = 0
    assert bench.tick(0.1).mode == "running"
    bench.state[1] = 7
    modes = [bench.tick(0.1).mode for _ in range(45)]
    assert modes.count("holding") == pytest.approx(2.0 / TICK, abs=2) and modes[-1] == "stopped"
    bench.state[1] = 0
    before = effort.restarts
    bench.supervisor.reset("anna")
    assert effort.restarts == before + 1 and bench.tick(0.1).mode == "running"
    bench.supervisor.begin()
    assert effort.restarts == before + 2


@pytest.mark.parametrize(
    ("pattern", "over"),
    [(lambda k: True, True), (lambda k: k % 2 == 0, True), (lambda k: k % 30 == 0, False)],
    ids=["always", "every second tick", "seldom"],
)
def test_trouble_that_comes_and_goes_counts_as_one(pattern: Callable[[int], bool], over: bool) -> None:
    patience = Patience(1.0)
    assert any(patience.is_over(k * TICK, pattern(k)) for k in range(200)) is over


def test_a_newer_command_of_the_same_stamp_is_followed_and_an_older_one_is_not() -> None:
    bench = Bench(TWIST)
    assert bench.sent(0.1)[0] == pytest.approx(0.05), "1 m/s^2 over 0.05 s"
    assert bench.sent(-0.1, age=TICK)[0] == pytest.approx(0.0)
    assert "stale_command" in bench.tick(0.1, age=3 * TICK).limited


def test_the_reason_of_a_hold_follows_what_holds_it() -> None:
    bench = Bench(TWIST, observation_timeout=0.2, command_timeout=0.2)
    bench.tick(0.0)
    for _ in range(6):
        bench.tick()
    assert bench.supervisor.state == ("holding", "no command")
    for _ in range(6):
        bench.tick(blind=True)
    assert bench.supervisor.state == ("holding", "observations are stale")
