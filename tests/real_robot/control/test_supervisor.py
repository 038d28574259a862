"""The supervisor, rule by rule, on a clock of the test's own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from real_robot.contract.safety import SafetyConfig
from real_robot.control.supervisor import SafetyEvent, SentCommand, Supervisor
from real_robot.types import Command, RobotObservation
from vla_rl.config import ConfigError, validate

TICK = 0.05
JOINT = {
    "name": "j",
    "kind": "position",
    "low": -1.0,
    "high": 1.0,
    "max_velocity": 0.5,
    "max_acceleration": 2.0,
    "state": 0,
}
TWIST = {"name": "v", "kind": "velocity", "low": -0.2, "high": 0.2, "max_acceleration": 1.0}
GRIPPER = {"name": "g", "kind": "position", "low": 0.0, "high": 1.0, "max_velocity": 10.0, "start": 1.0}


class Bench:
    """A supervisor with a clock, and observations that come unless told otherwise."""

    def __init__(self, *dimensions: dict[str, Any], **options: Any) -> None:
        self.now = 100.0
        self.events: list[SafetyEvent] = []
        values = {"control_hz": 20, "dimensions": list(dimensions), **options}
        self.supervisor = Supervisor(validate(SafetyConfig, values), lambda: self.now, self.events.append)
        self.state = np.zeros(4, np.float32)
        self.blocked = False

    def observe(self, age: float = 0.0, state: Any = None) -> None:
        numbers = self.state if state is None else np.asarray(state, np.float32)
        self.supervisor.observe(RobotObservation({}, numbers, "do it", self.now - age))

    def tick(self, *values: float, source: str = "policy", age: float = 0.0, blind: bool = False) -> SentCommand:
        self.now += TICK
        if not blind:
            self.observe()
        command = Command(np.array(values, np.float32), source, self.now - age) if values else None
        sent = self.supervisor.filter(command)
        self.follow(sent)
        return sent

    def follow(self, sent: SentCommand) -> None:
        """The joints are where they were sent to."""
        for i, limits in enumerate(self.supervisor.config.dimensions):
            if limits.state is not None and sent.values is not None and not self.blocked:
                self.state[limits.state] = sent.values[i]

    def sent(self, *values: float, **options: Any) -> list[float]:
        sent = self.tick(*values, **options).values
        assert sent is not None
        return sent.tolist()

    @property
    def mode(self) -> str:
        return self.supervisor.state.mode


def test_a_position_gets_there_within_its_limits_and_does_not_overshoot() -> None:
    bench = Bench(JOINT)
    path = [0.0, *(bench.sent(0.4)[0] for _ in range(60))]
    speed = np.diff(path) / TICK
    assert path[-1] == pytest.approx(0.4, abs=1e-4) and max(path) <= 0.4 + 1e-7
    assert speed.max() == pytest.approx(0.5, rel=1e-3), "as fast as it may"
    assert np.abs(np.diff(speed)).max() <= 2.0 * TICK + 1e-4
    assert bench.tick(0.4).limited == () or bench.tick(0.4).limited == ("acceleration",)
    assert len(path[: np.argmax(np.array(path) > 0.39)]) < 30, "0.8 s of motion, and the ramps"


def test_it_brakes_before_its_bound() -> None:
    bench = Bench({**JOINT, "max_velocity": 5.0})
    path = [0.0, *(bench.sent(50.0)[0] for _ in range(80))]
    speed = np.diff(path) / TICK
    assert max(path) <= 1.0 and path[-1] == pytest.approx(1.0, abs=1e-3)
    assert np.abs(np.diff(speed)).max() <= 2.0 * TICK + 1e-4
    assert "bounds" in bench.tick(50.0).limited


def test_the_first_command_starts_where_the_robot_is() -> None:
    bench = Bench(JOINT)
    bench.state[0] = 0.7
    assert bench.supervisor.filter(Command(np.zeros(1), "policy", bench.now)).values is None, "nobody knows where it is"
    assert bench.sent(0.0)[0] == pytest.approx(0.7 - 2.0 * TICK * TICK)


def test_a_robot_outside_its_limits_must_be_moved_by_hand() -> None:
    bench = Bench(JOINT)
    bench.state[0] = 1.3
    sent = bench.tick(0.0)
    assert sent.values is None and sent.mode == "stopped"
    assert "j is at 1.3, outside -1..1: move it inside by hand" in bench.supervisor.state.reason
    bench.state[0] = 0.9
    bench.supervisor.reset("anna")
    assert bench.tick(0.0).mode == "running"


@pytest.mark.parametrize(
    ("dimension", "after"), [(JOINT, "stands"), (TWIST, "zero")], ids=["position holds", "velocity is zero"]
)
def test_a_command_that_does_not_come_again_ends_in_a_hold(dimension: dict[str, Any], after: str) -> None:
    bench = Bench(dimension, command_timeout=0.2)
    for _ in range(6):
        bench.tick(0.2)
    assert bench.mode == "running"
    last = [bench.tick() for _ in range(20)]
    assert [sent.mode for sent in last[:4]] == ["running"] * 4 and {sent.mode for sent in last[5:]} == {"holding"}
    assert "command_timeout" in last[-1].limited
    end = [sent.values[0] for sent in last[-5:] if sent.values is not None]
    assert len(set(end)) == 1 and bench.supervisor.is_still
    assert end[0] == 0 if after == "zero" else 0 < end[0] <= 0.2
    assert bench.tick(0.2).mode == "running", "goes on by itself"


def test_stale_observations_hold_and_come_back() -> None:
    bench = Bench(TWIST, observation_timeout=0.2)
    assert [bench.tick(0.1, blind=k > 0).mode for k in range(7)] == ["running"] * 5 + ["holding"] * 2
    assert bench.supervisor.state.reason == "observations are stale"
    bench.observe(age=0.25)
    assert bench.tick(0.1, blind=True).mode == "holding", "a message that is old does not help"
    assert bench.tick(0.1).mode == "running"


@pytest.mark.parametrize(
    ("age", "state", "what"),
    [
        (-0.5, None, "not in the past"),
        (0.2, None, "older than the one before"),
        (math.nan, None, "not in the past"),
        (0.0, [math.nan, 0], "not finite"),
        (0.0, [], r"state of shape \(0,\), at least \(1,\)"),
    ],
)
def test_bad_observations_are_refused(age: float, state: Any, what: str) -> None:
    bench = Bench(JOINT)
    bench.tick(0.0)
    bench.now += TICK
    bench.observe(age, state)
    assert bench.events[-1].kind == "observation"
    assert re.search(what, bench.events[-1].text)


@pytest.mark.parametrize(
    "values", [[math.nan, 0.5], [math.inf, 0.5], [0.1], [[0.1, 0.5]], ["a", "b"], None, [10**400, 0], [0.1j, 0.5]]
)
def test_commands_that_cannot_be_are_refused_and_then_stop_it(values: Any) -> None:
    bench = Bench(TWIST, GRIPPER, max_refused=3)
    for _ in range(4):
        bench.tick(0.1, 0.0)
    for k in range(3):
        bench.now += TICK
        bench.observe()
        sent = bench.supervisor.filter(Command(values, "policy", bench.now))
        assert sent.mode == ("stopped" if k == 2 else "holding") and "bad_command" in sent.limited
        assert sent.values is not None and np.isfinite(sent.values).all()
    assert "3 commands refused" in bench.supervisor.state.reason


REFUSALS = {  # what comes after each refused command, and whether the robot stops in the end
    "nothing": ([], True),
    "a hold": (["hold"], True),
    "silence": (["none"] * 3, True),
    "a command that is late": (["late"], True),
    "a good one": (["good"], True),
    "as many good ones as may be refused": (["good"] * 3, False),
    "good ones, but a hold among them": (["good", "hold", "good", "hold", "good"], False),
    "too few good ones": (["good", "good"], True),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_resets_the_count_of_refused_commands(name: str) -> None:
    between, stops = REFUSALS[name]
    bench = Bench(TWIST, max_refused=3)
    for _ in range(8):
        bench.tick(math.nan)
        for what in between:
            if what == "none":
                bench.tick()
            else:
                bench.tick(0.1, source="hold" if what == "hold" else "policy", age=0.5 if what == "late" else 0.0)
    assert (bench.mode == "stopped") is stops
    if stops:
        assert "3 commands refused, the last: NaN or infinite v" in bench.supervisor.state.reason
        bench.supervisor.reset("anna")
        assert [bench.tick(math.nan).mode for _ in range(3)] == ["holding", "holding", "stopped"], "counted anew"


def test_one_bad_command_holds_until_a_good_one() -> None:
    bench = Bench(TWIST)
    bench.tick(0.1)
    assert bench.tick(math.nan).mode == "holding"
    assert "v" in bench.supervisor.state.reason and "NaN" in bench.supervisor.state.reason
    assert bench.tick().mode == "holding"
    assert bench.tick(0.1).mode == "running"


@pytest.mark.parametrize("age", [0.3, -0.3])
def test_commands_from_the_past_or_future_are_not_executed(age: float) -> None:
    bench = Bench(TWIST)
    sent = bench.tick(0.1, age=age)
    assert sent.mode == "holding" and "stale_command" in sent.limited and sent.requested is not None


def test_a_stop_stays_until_a_reset_and_motion_begins_with_a_new_command() -> None:
    bench = Bench(JOINT)
    for _ in range(8):
        bench.tick(0.9)
    before = bench.now
    bench.supervisor.stop("the red button")
    bench.supervisor.stop("another reason")
    assert bench.supervisor.state == ("stopped", "the red button")
    path = [bench.sent(0.9)[0] for _ in range(20)]
    assert path[-1] == path[-8] and bench.mode == "stopped" and bench.supervisor.is_still
    with pytest.raises(ValueError, match="say who resets"):
        bench.supervisor.reset(" ")
    bench.state[0] = path[-1]
    bench.supervisor.reset("anna")
    assert bench.mode == "holding"
    bench.now += TICK
    bench.observe()
    old = bench.supervisor.filter(Command(np.array([0.9], np.float32), "policy", bench.now - TICK - 0.01))
    assert old.mode == "holding" and before < bench.now and "dropped_command" in old.limited
    assert bench.tick(0.9).mode == "running"
    assert [e.text for e in bench.events if e.kind == "reset"] == ["anna resets after: the red button"]
    count = len(bench.events)
    bench.supervisor.reset("anna")
    assert len(bench.events) == count and bench.mode == "running", "a reset of what runs does nothing"


def test_after_a_reset_motion_begins_where_the_robot_was_moved_to() -> None:
    bench = Bench(JOINT)
    bench.tick(0.0)
    bench.supervisor.stop("moved by hand")
    bench.tick()
    bench.state[0] = 0.5
    bench.supervisor.reset("anna")
    assert bench.sent()[0] == 0.5


def test_it_brakes_harder_to_stop_when_it_may() -> None:
    bench = Bench({**TWIST, "stop_acceleration": 4.0})
    for _ in range(6):
        bench.tick(0.2)
    bench.supervisor.stop("now")
    assert bench.sent()[0] == pytest.approx(0.0, abs=1e-6)
    assert bench.supervisor.config.stopping_time() == pytest.approx(0.2 / 4.0 + TICK)


def test_the_deadman_switch() -> None:
    bench = Bench(TWIST, deadman=True, deadman_timeout=0.12)
    assert bench.tick(0.1).mode == "holding" and bench.supervisor.state.reason == "deadman switch released"
    bench.supervisor.deadman(True)
    assert [bench.tick(0.1).mode for _ in range(4)] == ["running", "running", "holding", "holding"], "no word counts"
    bench.supervisor.deadman(True)
    assert bench.tick(0.1).mode == "running"
    bench.supervisor.deadman(False)
    assert bench.tick(0.1).mode == "holding"


def test_a_hold_brakes_whatever_its_values() -> None:
    bench = Bench(TWIST)
    for _ in range(5):
        bench.tick(0.2)
    sent = [bench.tick(0.2, source="hold") for _ in range(6)]
    assert {s.mode for s in sent} == {"holding"} and sent[-1].values == 0 and "hold" in sent[-1].limited


@pytest.mark.parametrize("source", ["recovery", "correction"])
def test_people_are_limited_too(source: str) -> None:
    sent = Bench(TWIST).tick(9.0, source=source)
    assert sent.values is not None and sent.values[0] == pytest.approx(1.0 * TICK)
    assert sent.requested is not None and sent.requested[0] == 9.0 and sent.limited == ("acceleration", "bounds")


def test_an_unknown_source_is_refused() -> None:
    assert "bad_command" in Bench(TWIST).tick(0.1, source="stranger").limited


def test_a_dry_run_sends_nothing_and_shows_all() -> None:
    sent = Bench(TWIST, dry_run=True).tick(0.1)
    assert sent.values is None and sent.allowed is not None and sent.allowed[0] == pytest.approx(0.05)
    assert sent.limited == ("acceleration", "dry_run") and sent.mode == "running"


def test_a_clock_that_goes_backwards_stops_it() -> None:
    bench = Bench(TWIST)
    bench.tick(0.1)
    bench.now -= 10
    assert bench.tick(0.1).mode == "stopped" and "backwards" in bench.supervisor.state.reason
    bench.tick()
    bench.tick()
    bench.supervisor.reset("anna")
    assert bench.tick(0.1).mode == "running"


def test_a_clock_that_stands_still_stops_it_at_once() -> None:
    bench = Bench(TWIST)
    for _ in range(4):
        bench.tick(0.2)
    command = Command(np.array([0.2], np.float32), "policy", bench.now)
    sent = [bench.supervisor.filter(command) for _ in range(6)][-1]
    assert sent.mode == "stopped" and sent.values == 0


def test_a_control_loop_that_was_paused_does_not_leap() -> None:
    bench = Bench(JOINT)
    for _ in range(10):
        before = bench.sent(0.9)[0]
    bench.now += 60.0
    assert abs(bench.sent(0.9)[0] - before) <= 2.0 * TICK * TICK + 1e-6, "from standstill again"


def box(**options: Any) -> dict[str, Any]:
    return {"state": [0, 1, 2], "low": [-0.3] * 3, "high": [0.3] * 3, **options}


def test_velocities_slow_down_before_the_workspace_ends_and_only_lead_back() -> None:
    dims = [{**TWIST, "name": n} for n in "xyz"]
    bench = Bench(*dims, workspace=box(commands=[0, 1, 2]), checks={"motion_tolerance": 0})
    for _ in range(200):
        bench.state[:3] += np.array(bench.sent(0.2, 0.0, -0.2), np.float32) * TICK
    assert bench.state[0] == pytest.approx(0.3, abs=0.01) and bench.state[0] <= 0.3
    assert bench.state[2] == pytest.approx(-0.3, abs=0.01) and bench.state[2] >= -0.3
    bench.state[0] = 0.34
    sent = bench.tick(0.2, 0.2, 0.2)
    assert sent.values is not None and sent.values[0] == 0 and sent.values[1] > 0 and "workspace" in sent.limited
    assert bench.sent(-0.2, 0.0, 0.0)[0] < 0


def test_late_observations_count_the_way_since() -> None:
    dims = [{**TWIST, "name": n, "max_acceleration": None} for n in "xyz"]
    bench = Bench(*dims, workspace=box(commands=[0, 1, 2]), checks={"motion_tolerance": 0})
    bench.state[0] = 0.285
    assert bench.sent(0.2, 0.0, 0.0)[0] == pytest.approx(0.2)
    sent = [bench.sent(0.2, 0.0, 0.0, blind=True)[0] for _ in range(3)]
    assert sent[0] == pytest.approx(0.1) and sent[1:] == pytest.approx([0, 0], abs=1e-6), "0.015 m were left in all"


def test_a_clock_that_goes_backwards_forgets_the_way_that_was_sent() -> None:
    dims = [{**TWIST, "name": n, "max_acceleration": None} for n in "xyz"]
    bench = Bench(*dims, workspace=box(commands=[0, 1, 2]), checks={"motion_tolerance": 0})
    for _ in range(40):
        bench.tick(0.2, 0.0, 0.0)  # 0.4 m in all, as far as one knows
    bench.now -= 10
    bench.tick()
    bench.tick()
    bench.supervisor.reset("anna")
    assert bench.sent(0.2, 0.0, 0.0)[0] == pytest.approx(0.2)


def test_leaving_the_workspace_under_joint_commands_is_a_stop() -> None:
    bench = Bench({**JOINT, "state": 3}, workspace=box())
    assert bench.tick(0.1).mode == "running"
    bench.state[1] = 0.31
    assert bench.tick(0.1).mode == "stopped" and "left the workspace (y)" in bench.supervisor.state.reason


@pytest.mark.parametrize("stops", [False, True], ids=["is told", "stops"])
def test_a_policy_whose_commands_are_mostly_cut(stops: bool) -> None:
    bench = Bench(JOINT, {**JOINT, "name": "k", "state": 1}, checks={"stop_when_cut": stops})
    for k in range(60):
        bench.tick(0.1, 57.3 if k % 3 == 0 else 0.2)
    texts = [event.text for event in bench.events if "of the last 2 s were cut" in event.text]
    assert len(texts) == 1 and re.match(
        r"(stopped: )?\d+% .* k was asked for 57.3 and sent .* \(limits -1 to 1\)", texts[0]
    )
    assert bench.mode == ("stopped" if stops else "running")
    bench = Bench(JOINT, checks={"stop_when_cut": stops})
    for k in range(200):
        bench.tick(57.3 if k % 5 == 0 else 0.0)
    assert bench.mode == "running" and not [event for event in bench.events if "cut" in event.text], "a fifth is few"


def test_a_log_that_fails_stops_the_robot_and_not_the_supervisor() -> None:
    def log(_: SafetyEvent) -> None:
        raise OSError("disk full")

    now = 0.0
    config = validate(SafetyConfig, {"control_hz": 20, "dimensions": [TWIST]})
    supervisor = Supervisor(config, lambda: now, log)
    supervisor.observe(RobotObservation({}, np.zeros(1, np.float32), "", 0.0))
    supervisor.filter(Command(np.zeros(1, np.float32), "policy", 0.0))
    assert supervisor.state.mode == "stopped" and "disk full" in supervisor.state.reason


def changed(base: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"control_hz": 20, "dimensions": [{**base, **values}]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(JOINT, low=2.0), "j: low 2.0 must be below high 1.0"),
        (changed(JOINT, state=None), "either state .* or start"),
        (changed(JOINT, start=0.0), "either state .* or start"),
        (changed(JOINT, max_velocity=None), "needs max_velocity or max_step"),
        (changed(GRIPPER, start=4), "start 4.0 is outside"),
        (changed(JOINT, high=math.nan), "high"),
        (changed(TWIST, low=0.1), "must include zero"),
        (changed(TWIST, max_velocity=1), "low and high limit a velocity"),
        (changed(TWIST, stop_acceleration=0.5), "at least max_acceleration"),
        (changed(TWIST, speed=1), "unknown key"),
        ({"control_hz": 20, "dimensions": [TWIST, TWIST]}, "names must differ"),
        ({**changed(TWIST), "workspace": box(commands=[0, 1, 2])}, "a command has the numbers 0 to 0"),
        ({**changed(TWIST), "workspace": box(low=[1, 1, 1])}, "x: low 1.0 must be below high 0.3"),
        (
            {"control_hz": 20, "dimensions": [TWIST, JOINT, GRIPPER], "workspace": box(commands=[0, 1, 2])},
            "all positions or all velocities",
        ),
        (
            {
                "control_hz": 20,
                "dimensions": [{**JOINT, "name": n, "low": 0.5} for n in "xyz"],
                "workspace": box(commands=[0, 1, 2]),
            },
            "x: its limits and the workspace have nothing in common",
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(SafetyConfig, values, prefix="safety")


@pytest.mark.parametrize("stop", [lambda s: s.stop("x"), lambda s: s.deadman(True)])
def test_it_may_be_told_from_its_own_log(stop: Callable[[Supervisor], None]) -> None:
    bench = Bench(TWIST)
    supervisor = Supervisor(bench.supervisor.config, lambda: bench.now, lambda _: stop(supervisor))
    bench.supervisor = supervisor
    bench.tick(0.1)
    bench.tick(0.1)
