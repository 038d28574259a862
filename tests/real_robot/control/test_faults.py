"""A policy server that is killed, hangs, is slow, or restarts, as the robot's side sees it: real processes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from toy_server import CAMERAS, toy_server, toy_thread

from real_robot.client_package.vla_rl_client import InferenceTimeout, ServerUnavailable
from real_robot.contract.safety import SafetyConfig
from real_robot.contract.sections import ExecutionConfig
from real_robot.control.chunk_executor import ChunkExecutor
from real_robot.control.supervisor import SentCommand, Supervisor
from real_robot.serving.client import PolicyClient
from real_robot.types import RobotObservation

HZ = 20.0
COMMAND_TIMEOUT = 0.3
IMAGES = {name: np.full((224, 224, 3), 90, np.uint8) for name in CAMERAS}
MAX_ACCELERATION = 4.0


def see(x: float = 0.0, instruction: str = "go") -> RobotObservation:
    return RobotObservation(IMAGES, np.array([x, 0, 0, 0, 0], np.float32), instruction, time.monotonic())


class Robot:
    """Client, executor and supervisor of a robot that is told velocities, 20 times a second."""

    def __init__(self, address: str) -> None:
        self.client = PolicyClient(address, connect_timeout=0.5, infer_timeout=0.5, retry_after=0.1)
        execution = ExecutionConfig(control_hz=HZ, kind="velocity")
        self.executor = ChunkExecutor(lambda seen: self.client.act(seen)["actions"], execution)
        dimensions = [
            {"name": n, "kind": "velocity", "low": -1, "high": 1, "max_acceleration": MAX_ACCELERATION} for n in "xyz"
        ]
        values = {"control_hz": HZ, "dimensions": dimensions, "command_timeout": COMMAND_TIMEOUT}
        self.supervisor = Supervisor(SafetyConfig.model_validate(values))
        self.step = 0
        self.instruction = "go"
        self.sent: list[tuple[float, SentCommand]] = []

    def tick(self) -> SentCommand:
        start = time.monotonic()
        seen = see(1.0, self.instruction)
        self.supervisor.observe(seen)
        self.executor.submit(seen, self.step)
        sent = self.supervisor.filter(self.executor.next_action(self.step))
        self.step += 1
        self.sent.append((time.monotonic() - start, sent))
        time.sleep(max(0.0, 1 / HZ - (time.monotonic() - start)))
        return sent

    def until(self, condition: Callable[[SentCommand], bool], seconds: float = 30.0) -> float:
        """Tick until the condition holds; returns the seconds that took."""
        start = time.monotonic()
        while not condition(self.tick()):
            assert time.monotonic() - start < seconds, f"did not happen: {self.supervisor.state}"
        return time.monotonic() - start

    def check(self) -> None:
        """What was sent kept its limits, and no tick waited for the server."""
        values = np.array([s.values for _, s in self.sent], np.float64)
        assert np.abs(values).max() <= 1
        assert np.abs(np.diff(values, axis=0)).max() <= MAX_ACCELERATION / HZ + 1e-6
        assert max(spent for spent, _ in self.sent) < 2.0, "a tick waited"


@contextmanager
def robot(address: str) -> Iterator[Robot]:
    one = Robot(address)
    try:
        yield one
    finally:
        one.executor.close()
        one.client.close()


def moving(sent: SentCommand) -> bool:
    return sent.mode == "running" and sent.values is not None and bool(sent.values[0] > 0.5)


def standing(sent: SentCommand) -> bool:
    return sent.mode == "holding" and sent.values is not None and not sent.values.any()


# Of one chunk of 4 steps the rest may still be played, then the time-out runs, then it brakes (1 / 4 s).
WITHIN = 4 / HZ + COMMAND_TIMEOUT + 1 / MAX_ACCELERATION


@pytest.mark.live
@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_the_robot_holds_when_the_server_fails_and_goes_on_when_it_is_back(fault: str) -> None:
    with toy_server() as server, robot(server.address) as one:
        one.until(moving)
        if fault == "killed":
            server.process.kill()
        else:
            server.signal(signal.SIGSTOP)
        took = one.until(standing)
        assert took < WITHIN + 2.0, "with 2 s for a loaded machine"
        if fault == "killed":
            with toy_server(port=server.port):
                one.until(moving)
        else:
            server.signal(signal.SIGCONT)
            one.until(moving)
        assert one.client.generation >= 2 and one.executor.statistics().num_failed >= 1
        one.check()


@pytest.mark.live
def test_the_robot_holds_while_the_policy_takes_too_long_and_goes_on_when_it_answers() -> None:
    with toy_thread() as server, robot(server.address) as one:
        one.until(moving)
        one.instruction = "wait"
        took = one.until(standing)
        assert took < WITHIN + 2.0, "with 2 s for a loaded machine"
        one.instruction = "go"
        server.policy.gate.release(100)  # also for those that were asked anew meanwhile
        one.until(moving)
        assert one.client.generation >= 2 and one.executor.statistics().num_failed >= 1
        one.check()


@pytest.mark.live
def test_what_was_asked_before_the_connection_was_lost_is_never_executed() -> None:
    with toy_server() as server, robot(server.address) as one:
        one.until(moving)
        server.signal(signal.SIGSTOP)
        one.until(lambda _: one.executor.statistics().num_failed > 0)
        assert one.executor.next_action(one.step) is None
        server.signal(signal.SIGCONT)
        one.until(moving)
        one.check()


@pytest.mark.live
def test_errors_have_a_type_and_come_in_time() -> None:
    with toy_server() as server:
        client = PolicyClient(server.address, connect_timeout=0.5, infer_timeout=0.5, retry_after=0.0)
        client.act(see())
        server.signal(signal.SIGSTOP)
        for error in (InferenceTimeout, ServerUnavailable, ServerUnavailable):
            start = time.monotonic()
            with pytest.raises(error):
                client.act(see())
            assert time.monotonic() - start < 3.0
        server.signal(signal.SIGCONT)
        assert client.act(see(3.0))["actions"][0, 0] == 3, "not the answer to the request before"
        server.process.kill()
        server.process.wait()
        with pytest.raises(ServerUnavailable):
            client.act(see())


def test_a_late_answer_is_never_taken_for_the_next_one() -> None:
    with toy_thread() as server, PolicyClient(server.address, infer_timeout=0.1) as client:
        with pytest.raises(InferenceTimeout):
            client.act(see(1.0, "wait"))
        with server.computing():
            client._infer_timeout = 60.0
        assert client.act(see(2.0))["actions"][0, 0] == 2


@pytest.mark.live
def test_a_send_to_a_server_that_does_not_read_ends() -> None:
    with toy_server() as server:
        client = PolicyClient(server.address, infer_timeout=0.5)
        client.connect()
        server.signal(signal.SIGSTOP)
        big = {name: np.zeros((2000, 1800, 3), np.uint8) for name in CAMERAS}  # more than the sockets' buffers hold
        start = time.monotonic()
        with pytest.raises((ServerUnavailable, InferenceTimeout)):
            client.act(RobotObservation(big, np.zeros(5, np.float32), "go", 0.0))
        assert time.monotonic() - start < 10
        server.signal(signal.SIGCONT)


def test_a_port_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = PolicyClient(f"127.0.0.1:{listener.getsockname()[1]}", connect_timeout=0.3)
        with pytest.raises(ServerUnavailable):
            client.connect()
    with pytest.raises(ValueError, match="Allowed: host, host:port"):
        PolicyClient("ftp://x").connect()
