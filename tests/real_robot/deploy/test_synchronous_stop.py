"""`vla-rl deploy --synchronous` on ROS 1 and on ROS 2: a stop while the loop waits for the policy's chunk.

The simulated robot is a driver that follows its last twist for ever: it moves on for as long as nothing is sent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import RATE, Deployment, report
from processes import until

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(400)]
PATIENT = ["execution.infer_timeout=60", "silence=60", "observation.max_age=1", "safety.observation_timeout=1"]


@pytest.fixture(params=["ros1", "rclpy"])
def robot(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """The policy answers four times, then takes 30 s."""
    deployment = Deployment(
        tmp_path,
        behavior="slow",
        overrides=[*PATIENT, "safety.command_timeout=60"],
        sim=["command_timeout=1000"],
        options=("--start", "--synchronous"),
        graph=request.param,
    )
    try:
        deployment.await_motion()
        until(lambda: deployment.mode() == "waiting" and deployment.quiet(1.0), "the long wait", 60)
        now = time.monotonic()
        time.sleep(0.5)
        assert deployment.moves(now), "the robot goes on meanwhile"
        yield deployment
    finally:
        deployment.close()


def check_last_motion(robot: Deployment, asked: float) -> None:
    time.sleep(1.5)
    took = robot.last_motion() - asked
    report(took)
    assert took < 2 / RATE + 0.25, "this tick, the robot's own, and a busy machine"


def test_a_stop_button_brakes_while_a_chunk_is_awaited(robot: Deployment) -> None:
    button = robot.graph.node("button", "/stop", "1")
    until(lambda: button.says("ready"), "the button's listener")
    button.type("\n")
    check_last_motion(robot, button.said_at("pressed"))
    assert robot.mode() == "stopped"


def test_a_signal_brakes_while_a_chunk_is_awaited(robot: Deployment) -> None:
    asked = time.monotonic()
    robot.deploy.signal(signal.SIGTERM)
    check_last_motion(robot, asked)
    assert robot.deploy.process.wait(60) == 143
