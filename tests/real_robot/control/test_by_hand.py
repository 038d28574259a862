"""What a person pressed lasts until a person resets it; a policy that warms up is waited for."""

from __future__ import annotations

import re

import pytest
from test_robot_loop import Bench

from real_robot.contract.safety import SafetyConfig
from real_robot.control.robot_loop import OperatorCommand
from real_robot.control.supervisor import HOLDING, RUNNING, STOPPED, SafetyEvent, State, Supervisor
from real_robot.deploy.notices import HeldTicks, Repetition
from real_robot.operator.operators import Operators
from real_robot.transports.messages import Bool, String
from real_robot.types import RobotObservation

BY_HAND = ["console: anna", "keyboard", "console: anna, at vla-rl deploy, process 7 on desk"]


def stopped_bench(monkeypatch: pytest.MonkeyPatch, reason: str) -> Bench:
    bench = Bench(monkeypatch, "operator.reset=/reset", "operator.stop=/stop")
    bench.tick()
    assert bench.tick().sent.mode == RUNNING  # type: ignore[union-attr]
    if reason == "stop topic":
        bench.transport.deliver("/stop", Bool(data=True))
    else:
        bench.script.commands = [OperatorCommand(stop=reason)]
    bench.tick()
    bench.transport.deliver("/stop", Bool(data=False))
    assert bench.loop.supervisor.state == State(STOPPED, reason)
    return bench


@pytest.mark.parametrize("reason", BY_HAND)
def test_a_topic_does_not_undo_a_stop_that_a_person_pressed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    bench, told = stopped_bench(monkeypatch, reason), []
    bench.loop.supervisor._on_event = told.append
    for _ in range(3):
        bench.transport.deliver("/reset", String(data="a script"))
        assert bench.tick().sent.mode == STOPPED  # type: ignore[union-attr]
    assert f"a script: no reset while it lasts: {reason} pressed stop; reset it at the console" in told[0].text
    bench.script.commands = [OperatorCommand(reset="anna")]
    bench.tick()
    assert bench.tick().sent.mode == RUNNING  # type: ignore[union-attr]
    bench.transport.deliver("/stop", Bool(data=True))
    bench.tick()
    bench.transport.deliver("/stop", Bool(data=False))
    bench.tick()
    bench.transport.deliver("/reset", String(data="a script"))
    bench.tick()
    assert bench.tick().sent.mode == RUNNING, "the person's word was for that stop"  # type: ignore[union-attr]


def test_a_stop_pressed_after_another_lasts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = stopped_bench(monkeypatch, "stop topic")
    bench.script.commands = [OperatorCommand(stop="console: anna")]
    bench.tick()
    bench.transport.deliver("/reset", String(data="a script"))
    bench.tick()
    assert bench.loop.supervisor.state.mode == STOPPED
    bench.transport.deliver("/reset", String(data="a script"))
    bench.script.commands = [OperatorCommand(reset="anna")]
    bench.tick()
    assert bench.tick().sent.mode == RUNNING, "a person's reset counts beside a topic's"  # type: ignore[union-attr]


def test_of_two_resets_a_persons_is_named() -> None:
    class Says:
        def __init__(self, command: OperatorCommand) -> None:
            self.command = command

        def poll(self, observation: RobotObservation | None) -> OperatorCommand:
            return self.command

    topic, person = OperatorCommand(reset="x", by_topic=True), OperatorCommand(reset="anna")
    silent = OperatorCommand(by_topic=True)
    for commands in ([topic, person], [person, topic], [silent, person], [topic, person, topic, silent]):
        found = Operators([Says(c) for c in commands]).poll(None)
        assert (found.reset, found.by_topic) == ("anna", False)
    assert Operators([Says(silent), Says(topic)]).poll(None) == OperatorCommand(reset="x", by_topic=True)


@pytest.mark.parametrize("warm_up", [0, 100])
def test_a_policy_that_warms_up_is_waited_for_and_begins_by_itself(
    monkeypatch: pytest.MonkeyPatch, warm_up: int
) -> None:
    """Ten seconds, where two without an action are a stop."""
    bench, told = Bench(monkeypatch, "silence=2", "pace=clock"), []
    bench.loop._warms_up = lambda: len(bench.ticks) < warm_up
    held = HeldTicks(bench.loop.supervisor, bench.loop._warms_up, told.append)
    bench.loop.observers.append(held)
    given, bench.loop.actions.next_action = bench.loop.actions.next_action, lambda step: None
    for _ in range(100):
        bench.tick()
    assert bench.loop.supervisor.state.mode == (HOLDING if warm_up else STOPPED)
    assert [line.partition(":")[0] for line in told] == (["warming up"] if warm_up else [])
    if warm_up:
        bench.loop.actions.next_action = given
        for _ in range(3):
            bench.tick()
        assert bench.loop.supervisor.state.mode == RUNNING
        bench.loop.actions.next_action = lambda step: None
        for _ in range(50):
            bench.tick()
        assert bench.loop.supervisor.state.mode == STOPPED, "later it is not waited for"


def test_holds_are_told_as_shares_a_line_for_each_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, told = Bench(monkeypatch, "pace=clock", "silence=9"), []
    supervisor = bench.loop.supervisor
    bench.loop.observers.append(HeldTicks(supervisor, lambda: False, told.append))
    given = bench.loop.actions.next_action
    for k in range(420):  # 20 s; every fifth action is missing, and the camera hangs for a while in the second half
        bench.loop.actions.next_action = (lambda step: None) if k % 5 == 0 else given
        bench.tick(show=not 250 <= k < 300)
    assert re.fullmatch(r"held 20% of 20\d ticks: the policy had no action in time", told[0])
    assert len(told) == 2 and "ticks: observations are stale" in told[1], "each cause once a minute"


def test_a_pause_is_no_hold_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, told = Bench(monkeypatch, "pace=clock"), []
    bench.loop.observers.append(HeldTicks(bench.loop.supervisor, lambda: False, told.append))
    bench.script.poll = lambda observation: OperatorCommand(command=bench.loop._hold())  # type: ignore[method-assign]
    for _ in range(300):
        bench.tick()
    assert not told


def test_a_reason_with_another_number_is_the_same_reason() -> None:
    """A black camera's brightness is another one at each picture."""
    events: list[SafetyEvent] = []
    config = {"control_hz": 10, "dimensions": [{"name": "x", "kind": "velocity", "low": -1, "high": 1}]}
    supervisor = Supervisor(SafetyConfig.model_validate(config), on_event=events.append)
    for text in (
        "mean brightness 1.5 of 255",
        "mean brightness 2e-3 of 255",
        "-3 of 255",
        "a wall, 3 mm",
        "a wall, 4 mm",
    ):
        supervisor._enter(State(HOLDING, text), 0.0)
    supervisor._deliver()
    assert [event.text for event in events] == [
        f"{HOLDING}: {text}" for text in ("mean brightness 1.5 of 255", "-3 of 255", "a wall, 3 mm")
    ]
    assert supervisor.state.reason == "a wall, 4 mm", "the newest is shown"


def test_what_comes_again_and_again_is_left_to_the_shares() -> None:
    now = 0.0
    repetition = Repetition(lambda: now)
    assert [repetition.is_over(f"holding: stale by {k} ms") for k in range(5)] == [False] * 3 + [True] * 2
    assert not repetition.is_over("holding: black")
    now = 11.0
    assert not repetition.is_over("holding: stale by 9 ms")
