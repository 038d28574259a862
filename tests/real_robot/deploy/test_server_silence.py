"""A policy server that dies or hangs while a long chunk of it is played: real processes on a ROS 1 graph."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment
from processes import json_lines, missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]

BOUND = 0.4  # seconds in which every silence ends in a hold


@pytest.mark.parametrize("refill_at", ["0", "null"])
@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_chunk_is_not_played_on_without_its_server(tmp_path: Path, refill_at: str, trouble: signal.Signals) -> None:
    robot = Deployment(tmp_path, behavior="long", overrides=(f"execution.refill_at={refill_at}",))
    try:
        robot.await_motion()
        began = time.monotonic()
        robot.server.signal(trouble)
        until(lambda: robot.mode() == "holding", "a hold", 20)
        robot.check_stands(time.monotonic(), 1.0)
        moved = [line["time"] for line in json_lines(robot.ticks) if line["sent"] and np.any(line["sent"][:6])]
        print(f"last motion after {1000 * (max(moved) - began):.0f} ms")
        assert max(moved) - began <= BOUND
        robot.graph.children.remove(robot.server)
        until(lambda: robot.deploy.says("stopped: no action"), "the stop", 30)
    finally:
        robot.server.kill()
        robot.close()


def test_a_slow_first_inference_is_waited_for_and_the_robot_begins_by_itself(tmp_path: Path) -> None:
    """Six seconds, where three without an action are a stop and two without an answer a failure."""
    robot = Deployment(tmp_path, behavior="warms")
    try:
        until(lambda: robot.deploy.says("warming up: the policy computes its first actions"), "the word", 60)
        robot.await_motion()
        assert "stopped" not in robot.deploy.output()
    finally:
        robot.close()
