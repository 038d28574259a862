"""Sequences of an intervention worked out by hand: states, commands, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import HOLDING, RUNNING, STOPPED, SentCommand
from real_robot.operator.intervention import TRANSITIONS, Intervention, InterventionError
from real_robot.types import Command, RobotObservation

OBSERVATION = RobotObservation({}, np.zeros(2, np.float32), "push", 0.0)
POLICY = [np.array([0.1, 1.0], np.float32), np.array([0.2, 1.0], np.float32), np.array([-0.3, 5.0], np.float32)]


class Bench:
    """An intervention on a clock of ours. The first number of a command is a speed, the second a set-point."""

    def __init__(self, **options: float) -> None:
        self.now = 100.0
        self.it = Intervention(("velocity", "position"), clock=lambda: self.now, **options)  # type: ignore[arg-type]

    def tick(
        self, action: np.ndarray | None = None, mode: str = RUNNING, sent: np.ndarray | None = None
    ) -> OperatorCommand:
        """One tick as the loop makes it; the policy gives `action` where it is asked."""
        self.now += 0.1
        operator_command = self.it.poll(OBSERVATION)
        requested = operator_command.command or (None if action is None else Command(action, "policy", self.now))
        if not operator_command.active:
            self.it(Tick(0, self.now, OBSERVATION, True, None, None, 0.0, 0.0, operator_command))
            return operator_command
        values = requested.values if sent is None and requested is not None else sent
        is_hold = requested is not None and requested.source == "hold"
        result = SentCommand(values, values, (), HOLDING if is_hold else mode, values)
        self.it(Tick(0, self.now, OBSERVATION, True, requested, result, 0.0, 0.0, operator_command))
        return operator_command

    def reach(self, state: str) -> None:
        """Bring it into a state."""
        if state in ("idle", "demo"):
            if state == "demo":
                self.it.demonstrate("ann")
            return
        self.it.begin("ann")
        self.tick(POLICY[0])
        for step in {
            "autonomous": [],
            "paused": ["pause"],
            "rewinding": ["rewind"],
            "recovery": ["take_over"],
            "correction": ["take_over", "recovery_done"],
            "ended": ["take_over", "recovery_done", "correction_done"],
        }[state]:
            getattr(self.it, step)("ann")
        assert self.it.state == state


def test_a_whole_intervention() -> None:
    bench = Bench()
    it = bench.it
    assert bench.tick() == OperatorCommand(active=False)
    it.begin("ann")
    operator_command = bench.tick(POLICY[0])
    assert (
        operator_command.begin
        and operator_command.active
        and operator_command.command is None
        and it.control_source == "policy"
    )
    assert not bench.tick(POLICY[1]).begin
    assert it.alarm("score 3.1 above 2.0")
    operator_command = bench.tick()
    assert (
        operator_command.command is not None
        and operator_command.command.source == "hold"
        and it.control_source == "hold"
    )
    it.take_over("ann")
    it.give(np.array([0.5, 0.0]))
    operator_command = bench.tick()
    assert operator_command.command is not None and operator_command.command.source == "recovery" == it.control_source
    np.testing.assert_allclose(operator_command.command.values, [0.5, 0.0])
    it.recovery_done("ann")
    assert bench.tick().command.source == "correction"  # type: ignore[union-attr]
    it.correction_done("ann")
    assert it.state == "ended" and bench.tick() == OperatorCommand(active=False)
    assert it.summary.outcome is None
    it.success("bob")
    summary = it.summary
    assert (summary.outcome, summary.interventions, summary.recoveries, summary.alarms) == ("success", 1, 1, 1)
    assert [(t.event, t.who, t.after) for t in summary.transitions] == [
        ("begin", "ann", "autonomous"),
        ("alarm", "detector", "paused"),
        ("take_over", "ann", "recovery"),
        ("recovery_done", "ann", "correction"),
        ("correction_done", "ann", "ended"),
        ("success", "bob", "ended"),
    ]
    assert [round(t.time, 1) for t in summary.transitions] == [100.1, 100.3, 100.4, 100.5, 100.6, 100.7]
    assert summary.transitions[1].reason == "score 3.1 above 2.0"
    with pytest.raises(InterventionError, match="success"):
        it.success("ann")  # It has a label.


def test_rewind_goes_back_along_what_was_sent() -> None:
    """The speed turns its sign, the set-point is sent again, newest first; at the start it holds."""
    bench = Bench()
    bench.it.begin("ann")
    for action in POLICY:
        bench.tick(action, sent=action / 2)  # The supervisor halved it: this is the path.
    bench.tick(POLICY[0], mode=HOLDING)  # Not followed, so not of the path.
    bench.it.rewind("ann")
    commands = [bench.tick().command for _ in range(4)]
    assert [c.source for c in commands if c] == ["rewind", "rewind", "rewind", "hold"]
    np.testing.assert_allclose([c.values for c in commands[:3] if c], [[0.15, 2.5], [-0.1, 0.5], [-0.05, 0.5]])
    assert bench.it.state == "paused" and bench.it.summary.rewound == 3 and bench.it.summary.intervened
    with pytest.raises(InterventionError, match="no executed path"):
        bench.it.rewind("ann")


@pytest.mark.parametrize(
    "end",
    [lambda it: it.all_clear(), lambda it: it.pause("ann"), lambda it: it.take_over("ann")],
    ids=["all_clear", "pause", "take_over"],
)
def test_a_rewind_ends_early(end: Callable[[Intervention], object]) -> None:
    bench = Bench()
    bench.it.begin("ann")
    for action in POLICY:
        bench.tick(action)
    bench.it.rewind("ann")
    bench.tick()
    end(bench.it)
    assert bench.tick().command.source == "hold"  # type: ignore[union-attr]
    assert bench.it.path_length == 2


def test_a_rewind_has_a_longest() -> None:
    bench = Bench(max_rewind=2)
    bench.it.begin("ann")
    for action in POLICY:
        bench.tick(action)
    bench.it.rewind("ann")
    sources = [bench.tick().command.source for _ in range(3)]  # type: ignore[union-attr]
    assert sources == ["rewind", "rewind", "hold"] and bench.it.path_length == 1


@pytest.mark.parametrize("state", ["recovery", "correction", "ended"])
def test_control_never_returns_to_the_policy_in_an_episode(state: str) -> None:
    bench = Bench()
    bench.reach(state)
    with pytest.raises(InterventionError, match="rule 2"):
        bench.it.resume("ann")
    assert bench.it.state == state


def test_after_a_false_alarm_the_policy_goes_on_with_a_fresh_chunk() -> None:
    bench = Bench()
    bench.reach("paused")
    bench.it.resume("ann")
    operator_command = bench.tick(POLICY[0])
    assert operator_command.replan and not operator_command.begin and operator_command.command is None
    assert not bench.tick(POLICY[0]).replan
    assert not bench.it.summary.intervened


STATES = ("idle", "autonomous", "paused", "rewinding", "recovery", "correction", "demo", "ended")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", [e for e in TRANSITIONS if e not in ("alarm", "all_clear")])
def test_what_is_allowed_is_what_happens(state: str, event: str) -> None:
    bench = Bench()
    bench.reach(state)
    allowed = bench.it.allowed()
    if event in allowed:
        getattr(bench.it, event)("ann")
        assert bench.it.state == TRANSITIONS[event][1]
    else:
        with pytest.raises(InterventionError, match=event):
            getattr(bench.it, event)("ann")
        assert bench.it.state == state


def test_a_detector_does_not_disturb_a_person() -> None:
    bench = Bench()
    bench.reach("recovery")
    assert not bench.it.alarm("late") and not bench.it.all_clear()
    assert bench.it.state == "recovery" and bench.it.summary.alarms == 0


def test_a_person_who_falls_silent_holds_the_robot() -> None:
    bench = Bench()
    bench.it.begin("ann")
    bench.it.take_over("ann")
    bench.it.give(np.array([0.5, 0.0]))
    sources = [bench.tick().command.source for _ in range(4)]  # type: ignore[union-attr]
    assert sources == ["recovery", "recovery", "hold", "hold"]  # 0.1 and 0.2 s old; then older than 0.25 s


def test_a_command_from_before_the_take_over_is_not_followed() -> None:
    bench = Bench()
    bench.reach("paused")
    bench.it.give(np.array([0.5, 0.0]))
    bench.it.take_over("ann")
    assert bench.tick().command.source == "hold"  # type: ignore[union-attr]


def test_a_latched_stop_pauses_the_policy() -> None:
    bench = Bench()
    bench.it.begin("ann")
    bench.tick(POLICY[0], mode=STOPPED)
    assert bench.it.state == "paused" and bench.it.summary.transitions[-1].who == "supervisor"


def test_a_person_demonstrates_a_whole_episode() -> None:
    bench = Bench()
    bench.it.demonstrate("ann")
    bench.it.give(np.array([0.5, 0.0]))
    operator_command = bench.tick()
    assert operator_command.begin and operator_command.command is not None and operator_command.command.source == "demo"
    bench.it.success("ann")
    summary = bench.it.summary
    assert not summary.intervened and summary.recoveries == 0 and summary.outcome == "success"


def test_a_correction_that_fails_goes_back_to_recovery() -> None:
    bench = Bench()
    bench.it.begin("ann")
    for event in ("take_over", "recovery_done", "take_over"):
        getattr(bench.it, event)("ann")
        bench.it.give(np.array([0.5, 0.0]))
        bench.tick()
        bench.tick()
    assert bench.it.state == "recovery"
    assert (bench.it.summary.interventions, bench.it.summary.recoveries) == (1, 2)


@pytest.mark.parametrize("values", [np.zeros(3), np.array([np.nan, 0.0])], ids=["size", "nan"])
def test_bad_commands_are_refused(values: np.ndarray) -> None:
    with pytest.raises(InterventionError, match="2 finite numbers"):
        Bench().it.give(values)


def test_a_new_episode_begins_with_nothing_of_the_last() -> None:
    bench = Bench()
    bench.reach("ended")
    bench.it.begin("ann")
    summary = bench.it.summary
    assert summary.outcome is None and not summary.intervened and len(summary.transitions) == 1
    assert bench.it.path_length == 0
    with pytest.raises(InterventionError, match="who"):
        bench.it.pause(" ")


def test_a_tick_under_way_while_an_episode_begins_is_no_part_of_it() -> None:
    """The loop asks, a person begins the next episode, and only then the loop says what was sent."""
    bench = Bench()
    bench.reach("autonomous")
    command = Command(POLICY[1], "policy", bench.now)
    told = bench.it.poll(OBSERVATION)
    bench.it.failure("ann")
    bench.it.begin("ann")
    bench.it(Tick(1, bench.now, OBSERVATION, True, command, SentCommand(POLICY[1], POLICY[1], (), RUNNING), 0, 0, told))
    assert bench.it.path_length == 0, "a rewind would drive to where the last episode was"
    assert bench.tick(POLICY[2]).begin and bench.it.path_length == 1


def test_what_was_known_of_the_episode_before_and_no_longer() -> None:
    bench = Bench()
    bench.reach("recovery")
    bench.it.success("ann")
    bench.it.begin("bob")
    assert (bench.it.summary.number, bench.it.summary.outcome) == (2, None)
    before = bench.it.summary_of(1)
    assert before is not None and (before.outcome, before.interventions) == ("success", 1)
    bench.it.failure("bob")
    bench.it.begin("bob")
    assert bench.it.summary_of(1) is None and bench.it.summary_of(3) == bench.it.summary
