"""`vla-rl deploy --synchronous` on a real ROS 1 graph: a stop while the loop waits for the policy's chunk.

The simulated robot is a driver that follows its last twist for ever: it moves on for as long as nothing is sent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import RATE, Deployment
from processes import missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
PATIENT = ["execution.infer_timeout=60", "silence=60", "observation.max_age=1", "safety.observation_timeout=1"]


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Deployment]:
    """The policy answers four times, then takes 30 s."""
    deployment = Deployment(
        tmp_path,
        behavior="slow",
        overrides=[*PATIENT, "safety.command_timeout=60"],
        sim=["command_timeout=1000"],
        options=("--start", "--synchronous"),
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
    print(f"last motion after {1000 * took:.0f} ms")
    assert took < 2 / RATE + 0.25, "this tick, the robot's own, and a busy machine"


def test_a_stop_button_brakes_while_a_chunk_is_awaited(robot: Deployment) -> None:
    button = robot.graph.start("button", "tests/real_robot/press.py", "/stop")
    until(lambda: button.says("pressed"), "the button")
    check_last_motion(robot, float(button.output().split()[1]))
    assert robot.mode() == "stopped"


def test_a_signal_brakes_while_a_chunk_is_awaited(robot: Deployment) -> None:
    asked = time.monotonic()
    robot.deploy.signal(signal.SIGTERM)
    check_last_motion(robot, asked)
    assert robot.deploy.process.wait(60) == 143
