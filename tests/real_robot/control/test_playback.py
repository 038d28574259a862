"""Chunks played one after the other while the loop ticks on, with topics in memory and a clock of ours."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from test_robot_loop import TICK, Bench

from real_robot.control.playback import InferenceThread, SynchronousActions, SynchronousPacer
from real_robot.control.robot_loop import WAIT, OperatorCommand
from real_robot.transports.messages import Bool
from real_robot.types import RobotObservation

CHUNK = np.full((2, 7), 0.1, np.float32)


class Awaiting(Bench):
    """A policy that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.awaited: list[Future] = []
        super().__init__(monkeypatch, *overrides, chunk=self.ask)

    def ask(self, observation: RobotObservation) -> Future:
        self.asked.append(observation)
        self.awaited.append(Future())
        return self.awaited[-1]

    def play_a_chunk(self) -> None:
        self.tick()
        self.awaited[-1].set_result(CHUNK)
        self.tick(show=False)
        self.tick()


def test_nothing_is_sent_while_a_chunk_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lockstep a command is a step of the simulator: there is none between two actions, however long it takes."""
    bench = Awaiting(monkeypatch)
    bench.play_a_chunk()
    assert bench.twists() == [0.1, 0.1]
    assert bench.tick().sent is None and bench.tick(show=False).sent is None
    assert bench.twists() == [0.1, 0.1] and len(bench.asked) == 2
    bench.awaited[-1].set_result(2 * CHUNK)
    bench.tick(show=False)
    assert bench.twists() == [0.1, 0.1, 0.2] and bench.loop.step == 3


@pytest.mark.parametrize("how", ["stop", "topic", "inactive"])
def test_a_stop_brakes_at_the_next_tick(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    bench = Awaiting(monkeypatch)
    bench.play_a_chunk()
    assert bench.tick().sent is None
    if how == "topic":
        bench.transport.deliver("/stop", Bool(data=True))
    else:
        bench.script.commands = [OperatorCommand(stop="e-stop") if how == "stop" else OperatorCommand(active=False)]
    bench.tick(show=False)
    assert bench.twists()[-1] == 0.0
    assert how == "inactive" or bench.loop.supervisor.state.mode == "stopped"


def test_one_who_waits_for_long_is_held_by_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Awaiting(monkeypatch)
    bench.play_a_chunk()
    waited = 0.0
    while bench.tick().sent is None:
        waited += TICK
    assert bench.twists()[-1] == 0.0
    timeout = bench.contract.safety.command_timeout
    assert timeout - TICK <= waited <= timeout + TICK


def test_a_released_deadman_switch_brakes_at_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Awaiting(monkeypatch, "safety.deadman=true", "operator.deadman=/pedal", "safety.command_timeout=60")

    def press(pressed: bool) -> None:
        bench.transport.deliver("/pedal", Bool(data=pressed))

    press(True)
    bench.play_a_chunk()
    press(True)
    assert bench.twists() == [0.1, 0.1] and bench.tick().sent is None
    press(False)
    bench.tick()
    assert bench.twists()[-1] == 0.0


def test_a_chunk_that_was_asked_for_before_a_reset_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Awaiting(monkeypatch)
    bench.tick()
    bench.script.commands = [OperatorCommand(begin=True)]
    bench.tick()
    bench.tick()
    assert bench.awaited[0].cancelled() and len(bench.awaited) == 2
    bench.awaited[1].set_result(CHUNK)
    bench.tick(show=False)
    assert bench.twists()[-1] == 0.1


def see(value: float) -> RobotObservation:
    return RobotObservation({}, np.array([value], np.float32), "go", 0.0)


def test_one_inference_at_a_time_in_its_thread_and_errors_come_back() -> None:
    free, running = threading.Event(), []

    def infer(observation: RobotObservation) -> np.ndarray:
        running.append(float(observation.state[0]))
        free.wait(10)
        if observation.state[0] > 2:
            raise OSError("no more")
        return observation.state[None]

    thread = InferenceThread(infer)
    first, second, third = (thread(see(i)) for i in (1, 2, 3))
    second.cancel()
    free.set()
    assert first.result(10) == [[1]]
    with pytest.raises(OSError, match="no more"):
        third.result(10)
    assert running == [1, 3], "the second was dropped before its turn"


def test_the_pacer_waits_for_the_chunk_once_then_ticks_as_usual() -> None:
    class Usual:
        waits = 0

        def wait(self, active: bool) -> float:
            self.waits += 1
            return 0.0

    awaited: Future = Future()
    actions, usual = SynchronousActions(lambda o: awaited), Usual()
    pacer = SynchronousPacer(usual, actions, rate=100)
    pacer.wait(True)
    assert usual.waits == 1, "nothing is awaited"
    actions.submit(see(1), 0)
    assert actions.next_action(0) is WAIT
    begun = time.monotonic()
    pacer.wait(True)
    assert time.monotonic() - begun >= 0.009 and usual.waits == 1, "a control tick"
    awaited.set_result(np.zeros((1, 1), np.float32))
    pacer.wait(True)
    assert usual.waits == 1, "at once"
    pacer.wait(True)
    assert usual.waits == 2, "nobody has fetched it: no racing"
