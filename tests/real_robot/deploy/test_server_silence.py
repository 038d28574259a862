"""A policy server that dies or hangs while a long chunk is played and the next is asked for, or is slow at first.

(`test_trials.py` has those whose next chunk is asked for at the end of the last.)
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment, report
from processes import json_lines, until

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]
GRAPHS = pytest.mark.parametrize("graph", ["ros1", "rclpy"])

BOUND = 0.4  # seconds in which every silence ends in a hold


@GRAPHS
@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_chunk_is_not_played_on_without_its_server(tmp_path: Path, graph: str, trouble: signal.Signals) -> None:
    robot = Deployment(tmp_path, behavior="long", overrides=("execution.refill_at=null",), graph=graph)
    try:
        robot.await_motion()
        began = time.monotonic()
        robot.server.signal(trouble)
        until(lambda: robot.mode() == "holding", "a hold", 20)
        robot.check_stands(time.monotonic(), 1.0)
        moved = [line["time"] for line in json_lines(robot.ticks) if line["sent"] and np.any(line["sent"][:6])]
        report(max(moved) - began)
        assert max(moved) - began <= BOUND
        robot.graph.children.remove(robot.server)
        until(lambda: robot.deploy.says("stopped: no action"), "the stop", 30)
    finally:
        robot.server.kill()
        robot.close()


@GRAPHS
def test_a_slow_first_inference_is_waited_for_and_the_robot_begins_by_itself(tmp_path: Path, graph: str) -> None:
    """Six seconds, where three without an action are a stop and two without an answer a failure."""
    robot = Deployment(tmp_path, behavior="warms", graph=graph)
    try:
        until(lambda: robot.deploy.says("warming up: the policy computes its first actions"), "the word", 60)
        robot.await_motion()
        assert "stopped" not in robot.deploy.output()
    finally:
        robot.close()
