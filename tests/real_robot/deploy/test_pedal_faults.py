"""A dead-man's pedal on a real ROS 1 graph: its node dies, or hangs, while the pedal is held down."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import RATE, Deployment
from processes import json_lines, missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]

TIMEOUT = 0.4
PEDAL = ["operator.deadman=/pedal", "safety.deadman=true", f"safety.deadman_timeout={TIMEOUT}"]


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, overrides=PEDAL)
    try:
        yield deployment
        deployment.check_records()
    finally:
        deployment.close()


def last_motion(robot: Deployment, since: float) -> float:
    """Seconds from `since` until the last command that moves the robot."""
    moving = [line["time"] for line in json_lines(robot.ticks) if line["sent"] and np.any(line["sent"][:6])]
    return max(moving) - since


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_pedal_whose_node_is_gone_counts_as_released(robot: Deployment, how: signal.Signals) -> None:
    until(lambda: robot.mode() == "holding" and robot.deploy.says("deadman switch released"), "the first hold")
    assert not robot.moves(0.0), "never heard: released"
    pedal = robot.graph.start("pedal", "tests/real_robot/pedal.py")
    robot.await_motion()
    pedal.signal(how)
    gone = time.monotonic()
    robot.check_stands(gone + TIMEOUT + 1.5 / RATE, 3.0)
    seconds = last_motion(robot, gone)
    print(f"last motion {seconds * 1000:.0f} ms after the pedal's node was gone")
    assert seconds <= TIMEOUT + 1 / RATE and robot.mode() == "holding"
    if how == signal.SIGSTOP:
        pedal.signal(signal.SIGCONT)
    else:
        robot.graph.start("pedal_again", "tests/real_robot/pedal.py")
    robot.await_motion()
