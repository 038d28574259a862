"""`safety.wrench`: a robot that reports too much force or torque, or none, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory_transport import MemoryTransport
from test_alignment import Clocks

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.control.supervisor import HOLDING, RUNNING, STOPPED, Supervisor
from real_robot.transports.messages import Float64MultiArray, WrenchStamped
from real_robot.types import Command
from vla_rl.config import ConfigError, validate

TICK = 0.05
NUMBERS = {"topic": "/state", "type": "std_msgs/Float64MultiArray", "align": {"timeline": "receive"}}
LIMITS = {"topic": "/wrench", "max_force": 20, "max_torque": 5}


def contract(**wrench: Any) -> RobotContract:
    return validate(
        RobotContract,
        {
            "name": "arm",
            "observation": {"state": [NUMBERS]},
            "action": [{"topic": "/speed", "type": "std_msgs/Float64MultiArray", "indices": [0]}],
            "safety": {
                "control_hz": 20,
                "dimensions": [{"name": "v", "kind": "velocity", "low": -1, "high": 1, "max_acceleration": 40}],
                "wrench": LIMITS | wrench,
            },
            "execution": {"control_hz": 20},
        },
    )


class Bench:
    """A robot whose state and wrench come at every tick, and its supervisor."""

    def __init__(self, **wrench: Any) -> None:
        self.clocks, self.transport = Clocks(), MemoryTransport()
        told = contract(**wrench)
        self.robot = TopicRobot(told, self.transport, "go", self.clocks.monotonic, self.clocks.wall)
        self.supervisor = Supervisor(told.safety, self.clocks.monotonic, state_checks=self.robot.state_checks)

    def feel(self, force: float, torque: float = 0.0) -> None:
        """A wrench arrives, of that length, along no axis."""
        along = np.array([2.0, -1.0, 2.0]) / 3
        self.transport.deliver("/wrench", WrenchStamped(force=force * along, torque=torque * along))

    def tick(self) -> str:
        self.clocks.now += TICK
        self.transport.deliver("/state", Float64MultiArray(data=np.zeros(1)))
        observation = self.robot.read()
        assert observation is not None
        self.supervisor.observe(observation)
        sent = self.supervisor.filter(Command(np.array([0.5], np.float32), "policy", self.clocks.now))
        assert sent.values is not None
        assert (sent.values[0] == 0) == (sent.mode != RUNNING)
        return sent.mode

    @property
    def reason(self) -> str:
        return self.supervisor.state.reason


@pytest.mark.parametrize(
    ("force", "torque", "reason"),
    [
        (20.5, 0, "force is 20.5 N, at most 20 is allowed"),
        (0, -5.25, "torque is 5.25 Nm, at most 5 is allowed"),
    ],
)
def test_beyond_a_limit_it_holds_goes_on_after_it_and_stops_where_it_lasts(
    force: float, torque: float, reason: str
) -> None:
    bench = Bench()
    bench.feel(19.5, 4.9)
    assert bench.tick() == RUNNING
    bench.feel(force, torque)
    assert bench.tick() == HOLDING and bench.reason == reason
    bench.feel(1)
    bench.tick()
    bench.feel(1)
    assert bench.tick() == RUNNING, "it was let go"
    modes = []
    for _ in range(60):
        bench.feel(force, torque)
        modes.append(bench.tick())
    assert modes.count(HOLDING) == pytest.approx(2.0 / TICK, abs=2) and modes[-1] == STOPPED
    assert bench.reason == reason


def test_a_blow_between_two_observations_is_not_missed() -> None:
    bench = Bench()
    for force in (1, 80, 2):
        bench.feel(force)
    assert bench.tick() == HOLDING and bench.reason == "force is 80 N, at most 20 is allowed"
    assert bench.tick() == RUNNING, "it is told once"


def test_what_happened_before_an_episode_is_forgotten() -> None:
    bench = Bench()
    bench.feel(80)
    bench.feel(1)
    bench.supervisor.begin()
    assert bench.tick() == RUNNING


def test_without_a_wrench_it_holds_and_says_why() -> None:
    bench = Bench()
    assert bench.tick() == HOLDING and bench.reason == "/wrench has not shown force and torque yet"
    bench.feel(1)
    assert bench.tick() == RUNNING
    ticks = 1
    while bench.tick() == RUNNING:
        ticks += 1
    assert ticks * TICK == pytest.approx(0.25, abs=TICK)
    assert bench.reason == "/wrench has not shown force and torque for 0.25 s"
    bench.feel(1)
    assert bench.tick() == RUNNING


@pytest.mark.parametrize("force", [np.nan, np.inf])
def test_a_sensor_that_fails_counts_as_silent(force: float) -> None:
    bench = Bench()
    bench.feel(force)
    assert bench.tick() == HOLDING
    assert bench.reason == "/wrench has not shown force and torque yet: NaN or infinity"


def test_one_of_the_two_limits_is_enough_and_none_is_an_error() -> None:
    bench = Bench(max_torque=None)
    bench.feel(1, 1000)
    assert bench.tick() == RUNNING
    with pytest.raises(ConfigError, match=r"safety.wrench: /wrench: needs max_force \(N\), max_torque \(Nm\), or both"):
        contract(max_force=None, max_torque=None)
