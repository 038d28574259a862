"""The rclpy transport with real rclpy: Jazzy's, on Fast DDS, in an environment of its own (`make setup-dev`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import ROOT, open_graph

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_the_transport_on_a_real_rclpy(tmp_path: Path) -> None:
    graph = open_graph("rclpy", tmp_path)
    command = [graph.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-o", "addopts="]
    done = subprocess.run(
        [*command, "tests/real_robot/transports/ros/inside_ros2.py"],
        cwd=ROOT, env=graph.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]
