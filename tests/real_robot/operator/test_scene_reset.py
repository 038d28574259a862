"""An episode of a person's begins when the contract's services have answered and the new scene is seen."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import numpy as np
import pytest
from memory_transport import MemoryTransport

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.load import load_contract
from real_robot.contract.sections import EpisodeServices
from real_robot.operator.intervention import Intervention, InterventionError
from real_robot.operator.operators import KeyOperator, OutcomeTopic
from real_robot.operator.scene_reset import SceneReset, with_scene_reset
from real_robot.transports.action_types import ActionType, ServiceType, TriggerResponse
from real_robot.transports.actions import ActionClient, Answer
from real_robot.transports.base import TransportError
from real_robot.transports.messages import Message, String
from real_robot.types import RobotObservation


class Services(MemoryTransport):
    """A graph whose services answer when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = True
        self.waiting: dict[str, Callable[[Answer], None]] = {}

    def service(self, name: str, service: ServiceType) -> Services.Client:
        return Services.Client(self, name)

    def action(self, name: str, action: ActionType) -> ActionClient:
        raise AssertionError("none is asked for")

    class Client:
        def __init__(self, graph: Services, name: str) -> None:
            self._graph, self._name = graph, name

        @property
        def ready(self) -> bool:
            return self._graph.ready

        def call(self, request: Message, answer: Callable[[Answer], None]) -> None:
            self._graph.waiting[self._name] = answer


class Bench:
    """Ticks that come when the test says. `scene`: what the loop polls."""

    def __init__(self, reset: str = "/reset") -> None:
        self.now, self.told, self.flushed = 0.0, [], []
        self.graph = Services()
        self.episode = Intervention(["velocity"], clock=lambda: self.now)
        hold = lambda why: self.episode.alarm(why, "scene")  # noqa: E731
        config = EpisodeServices(begin="/begin", reset=reset)
        self.scene = SceneReset(
            self.episode, config, self.graph, self.flushed.append, hold, self.told.append, lambda: self.now
        )

    def poll(self, seconds: float = 0.1, seen: float | None = 0.0) -> tuple[bool, bool]:
        """(active, begin) at a tick, with an observation that old; None: there is none."""
        self.now += seconds
        state = None if seen is None else RobotObservation({}, np.zeros(1, np.float32), "push", self.now - seen)
        told = self.scene.poll(state)
        return told.active, told.begin

    def answer(self, name: str, success: bool = True, message: str = "") -> None:
        self.graph.waiting.pop(name)(TriggerResponse(success=success, message=message))


def test_the_robot_is_inactive_until_the_scene_is_there_and_seen() -> None:
    bench = Bench()
    assert bench.poll() == (False, False)
    bench.episode.begin("anna")
    assert bench.poll(seen=None) == (False, False) and not bench.graph.waiting, "the robot is not there yet"
    assert bench.poll() == (False, False) and "/begin" in bench.graph.waiting
    assert bench.poll(1.0) == (False, False), "no answer"
    bench.answer("/begin")
    assert bench.poll(0.1, seen=0.05) == (False, False), "answered at this tick; what is seen is from before"
    assert bench.poll(0.1, seen=0.05) == (True, True)
    assert bench.flushed == [pytest.approx(1.4)], "what was seen before the answer is forgotten"
    assert bench.poll() == (True, False)

    bench.episode.success("anna")
    bench.episode.begin("anna")
    assert bench.poll() == (False, False) and "/begin" in bench.graph.waiting, "each episode"


def test_a_simulator_that_waits_for_commands_publishes_its_scene_once() -> None:
    bench = Bench()
    bench.episode.begin("anna")
    bench.poll()
    bench.answer("/begin")
    bench.poll(0.1, seen=0.05)
    seen = 0.05
    while bench.poll(0.1, seen := seen + 0.1) == (False, False):
        assert bench.now < 2
    assert bench.now < 1 and bench.flushed == [pytest.approx(0.1)], "since it was asked for"


@pytest.mark.parametrize(
    ("answers", "why"),
    [("refused", "service /begin refused: no room"), ("never", "service /begin has not answered for 10 s")],
)
def test_a_scene_that_is_not_laid_out_pauses_the_policy_with_the_reason(answers: str, why: str) -> None:
    bench = Bench()
    bench.episode.begin("anna")
    bench.poll()
    if answers == "refused":
        bench.answer("/begin", success=False, message="no room")
    assert bench.poll(11.0) == (True, True)
    assert bench.episode.state == "paused" and bench.episode.summary.transitions[-1].reason == why
    bench.episode.resume("anna")
    assert bench.poll() == (True, False), "the person has laid it out"


def test_a_service_that_is_not_there_is_waited_for_and_named() -> None:
    bench = Bench()
    bench.graph.ready = False
    bench.episode.demonstrate("anna")
    assert bench.poll() == (False, False)
    assert bench.poll(11.0) == (True, True)
    assert bench.told == ["service /begin is not there for 10 s"], "a person drives: nothing is paused, it is told"


def test_an_episode_that_the_person_gives_up_does_not_begin_later() -> None:
    bench = Bench()
    bench.episode.begin("anna")
    bench.poll()
    bench.episode.failure("anna")
    assert bench.poll() == (False, False)
    bench.answer("/begin")
    assert bench.poll() == (False, False) and bench.poll() == (False, False)


def test_a_new_scene_between_episodes() -> None:
    bench = Bench()
    assert bench.scene.can_reset
    bench.scene.reset("anna")
    assert not bench.scene.can_reset
    with pytest.raises(InterventionError, match="the scene is being laid out"):
        bench.scene.reset("anna")
    bench.poll()
    bench.episode.begin("anna")
    bench.poll()
    assert list(bench.graph.waiting) == ["/reset"], "first the one, then the other"
    bench.answer("/reset", message="scene 3")
    bench.poll()
    assert bench.told == ["new scene (anna): scene 3"] and list(bench.graph.waiting) == ["/begin"]
    with pytest.raises(InterventionError, match=r"episode\.reset names no service"):
        Bench(reset="").scene.reset("anna")


def test_without_services_nothing_is_around_the_person_and_a_transport_without_them_is_an_error() -> None:
    contract = load_contract("sim_robot")
    person, ignore = Intervention(["velocity"]), lambda text: None
    robot = TopicRobot(contract, MemoryTransport(), "push")
    assert with_scene_reset(person, EpisodeServices(), robot, ignore, ignore) is None
    with pytest.raises(TransportError, match=r"episode: /episode/begin: MemoryTransport has no services.*Set episode="):
        with_scene_reset(person, contract.episode, robot, ignore, ignore)


def test_keys_begin_at_start_and_a_sensor_ends_what_they_began() -> None:
    transport, told = MemoryTransport(), []
    keys = KeyOperator(StringIO(""), active=True, say=told.append)
    OutcomeTopic("/outcome", transport, keys, told.append)
    assert [(c.active, c.begin) for c in (keys.poll(None), keys.poll(None))] == [(True, True), (True, False)]
    transport.deliver("/outcome", String(data="success"))
    assert keys.poll(None).active is False
    assert told == ["success (/outcome). The robot holds; Enter begins the next episode"]
    transport.deliver("/outcome", String(data="failure"))
    assert len(told) == 1, "nothing to end"
