"""What a person's topics permit is as old as its last message."""

from __future__ import annotations

import math

import pytest
from memory_transport import MemoryTransport

from real_robot.contract.load import load_contract
from real_robot.contract.sections import OperatorTopics
from real_robot.control.robot_loop import OperatorCommand
from real_robot.operator.intervention import Intervention
from real_robot.operator.operators import Operators, OutcomeTopic, TopicOperator
from real_robot.transports.messages import Bool, String
from real_robot.types import Deadman, RobotObservation
from vla_rl.config import ConfigError


class Bench:
    """A topic operator on a clock of the test's own."""

    def __init__(self, **topics: object) -> None:
        self.now = 50.0
        self.transport = MemoryTransport()
        self.operator = TopicOperator(OperatorTopics.model_validate(topics), self.transport, lambda: self.now)

    def poll(self, later: float = 0.0) -> OperatorCommand:
        self.now += later
        return self.operator.poll(None)


def test_a_switch_is_as_old_as_its_last_word() -> None:
    bench = Bench(deadman="/pedal")
    assert bench.poll().deadman == Deadman(False, -math.inf), "never heard: released"
    bench.transport.deliver("/pedal", Bool(data=True))
    assert bench.poll(4.0).deadman == Deadman(True, 50.0), "polling makes it no younger"
    assert Bench().poll().deadman is None


def test_a_stop_that_is_shorter_than_a_tick_stops() -> None:
    bench = Bench(stop="/stop")
    assert bench.poll().stop is None
    bench.transport.deliver("/stop", Bool(data=True))
    bench.transport.deliver("/stop", Bool(data=False))
    assert bench.poll().stop == "stop topic" and bench.poll().stop is None


def test_a_reset_without_a_name_is_the_topics() -> None:
    """One of blanks is not let into the supervisor, which refuses it with an error that would end the loop."""
    bench = Bench(reset="/reset")
    for text, who in (("anna", "anna"), ("", "topic"), ("  ", "topic")):
        bench.transport.deliver("/reset", String(data=text))
        assert bench.poll().reset == who


class Person:
    """An operator with a switch."""

    def __init__(self, deadman: Deadman | None) -> None:
        self.deadman = deadman

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return OperatorCommand(deadman=self.deadman)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Deadman(True, 2.0), None, Deadman(True, 2.0)),
        (None, Deadman(True, 2.0), Deadman(True, 2.0)),
        (Deadman(True, 2.0), Deadman(True, 1.0), Deadman(True, 1.0)),
        (Deadman(True, 2.0), Deadman(False, 3.0), Deadman(False, 2.0)),
        (None, None, None),
    ],
)
def test_of_two_switches_both_must_be_held(one: Deadman | None, other: Deadman | None, both: Deadman | None) -> None:
    assert Operators([Person(one), Person(other)]).poll(None).deadman == both


def test_a_stop_button_that_falls_silent_stops() -> None:
    bench = Bench(stop="/stop", stop_timeout=0.3)
    assert bench.poll() == OperatorCommand(active=False), "never heard: nothing moves, nothing latches"
    bench.transport.deliver("/stop", Bool(data=False))
    assert bench.poll(0.3) == OperatorCommand()
    assert bench.poll(0.1).stop == "the stop topic /stop has been silent for 0.3 s"
    bench.transport.deliver("/stop", Bool(data=False))
    assert bench.poll() == OperatorCommand()
    assert Bench(stop="/stop").poll(9.0) == OperatorCommand(), "without a limit it may be silent"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["operator.deadman=/pedal"],
            "operator.deadman: /pedal, but safety.deadman is false",
        ),
        (["safety.deadman=true"], "safety.deadman: true, but no operator.deadman names the switch's topic"),
        (["operator.stop=''", "operator.stop_timeout=1"], "operator.stop_timeout: 1, but there is no operator.stop"),
    ],
)
def test_half_a_switch_is_a_configuration_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_contract("sim_robot", overrides)
    load_contract("sim_robot", ["operator.deadman=/pedal", "safety.deadman=true"])


def test_a_sensor_ends_an_episode_and_its_nonsense_is_told() -> None:
    transport, told = MemoryTransport(), []
    episode = Intervention(["velocity"])
    OutcomeTopic("/outcome", transport, episode, told.append)
    transport.deliver("/outcome", String(data="success"))
    assert "success: not possible while idle" in told.pop() and episode.state == "idle"
    episode.begin("anna")
    transport.deliver("/outcome", String(data="solved"))
    assert told.pop() == "/outcome: got 'solved', allowed: success, failure" and episode.state == "autonomous"
    transport.deliver("/outcome", String(data="success"))
    assert (episode.state, episode.summary.outcome, told) == ("ended", "success", [])
    assert episode.summary.transitions[-1].who == "/outcome"
