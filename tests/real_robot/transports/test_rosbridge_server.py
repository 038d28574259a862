"""The `rosbridge` transport against rosbridge_suite's own server on a real ROS 1 graph, where one can be started.

The server is in no package index, so name a command that starts it, with `{port}` for its port; it finds the
master in ROS_MASTER_URI:

    VLA_RL_ROSBRIDGE='roslaunch rosbridge_server rosbridge_websocket.launch port:={port}' \\
        pytest -m slow tests/real_robot/transports/test_rosbridge_server.py
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import MAX_AGE, SILENCE, SLACK, Deployment
from processes import PATIENCE, Child, RosGraph, json_lines, missing_ros, until

from real_robot.transports.ros.master import free_port

COMMAND = os.environ.get("VLA_RL_ROSBRIDGE", "")
MISSING = missing_ros() or ("" if COMMAND else "no rosbridge server: set VLA_RL_ROSBRIDGE to a command that starts one")
POLICY, TASK, NUM_EPISODES = "pretrained:tabletop_base", "push_to_zone", 10

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "a rosbridge server is there"),
]


def start_bridge(graph: RosGraph, port: int) -> Child:
    environment = {name: value for name, value in graph.env.items() if name != "PYTHONPATH"}
    bridge = Child(shlex.split(COMMAND.format(port=port)), graph.folder / "bridge.log", environment)
    graph.children.append(bridge)
    until(lambda: answers(port) or bridge.says("\0"), "the bridge")
    return bridge


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def through(port: int) -> str:
    return f"transport={{kind: rosbridge, url: 'ws://127.0.0.1:{port}', ros: 1}}"


class Bridged(Deployment):
    """The processes of the faults' tests, and a bridge between deploy and the graph."""

    def transport(self) -> list[str]:
        self.bridge_port = free_port()
        self.bridge = start_bridge(self.graph, self.bridge_port)
        return [through(self.bridge_port)]


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Bridged]:
    deployment = Bridged(tmp_path)
    try:
        deployment.await_motion()
        yield deployment
        deployment.check_records()
    finally:
        deployment.close()


def heard(robot: Bridged, since: float) -> bool:
    """Deploy has an observation that was made since then."""
    return any(line["stamp"] and line["stamp"] > since for line in json_lines(robot.ticks))


def test_a_bridge_that_dies_stops_the_robot_until_it_is_back_and_a_person_resets(robot: Bridged) -> None:
    robot.bridge.kill()
    died = time.monotonic()
    until(lambda: robot.mode() == "stopped", "the stop", SILENCE + 5)
    robot.check_stands(died + MAX_AGE + SLACK, 1.0)
    robot.deploy.type("r")
    robot.check_stands(time.monotonic() + 0.2, 2.0)
    assert robot.mode() == "stopped", "no reset without the bridge"
    robot.bridge = start_bridge(robot.graph, robot.bridge_port)
    back = time.monotonic()
    until(lambda: heard(robot, back), "the robot, through the new bridge")
    robot.check_stands(back, 2.0)
    robot.reset()


def test_a_bridge_that_hangs_is_noticed_by_the_age_of_messages(robot: Bridged) -> None:
    """Its connections stay open. What was sent to it meanwhile arrives late, and must move nothing for long."""
    robot.bridge.signal(signal.SIGSTOP)
    hung = time.monotonic()
    until(lambda: robot.mode() == "stopped", "the stop", SILENCE + 5)
    robot.check_stands(hung + MAX_AGE + SLACK, 1.0)
    robot.bridge.signal(signal.SIGCONT)
    awake = time.monotonic()
    until(lambda: heard(robot, awake), "the robot, through the bridge")
    robot.check_stands(awake + 0.5, 2.0)
    assert robot.mode() == "stopped"
    robot.reset()


def outcomes(graph: RosGraph, name: str, server: int, transport: str) -> list[tuple[bool, int]]:
    """(success, steps) of some episodes in lockstep."""
    results = graph.folder / f"{name}.json"
    patient = [f"{key}=60" for key in ("observation.max_age", "safety.observation_timeout", "safety.command_timeout")]
    child = graph.cli(
        *(name, "deploy", "sim_robot", transport, *patient, "silence=120", "pace_timeout=20", "--synchronous"),
        "execution.infer_timeout=60",
        *("--server", f"127.0.0.1:{server}", "--wait", str(4 * PATIENCE)),
        *("--episodes", str(NUM_EPISODES), "--task", TASK, "--results", str(results)),
    )
    until(lambda: graph.check_alive() or child.process.poll() is not None, "the episodes", 600)
    assert child.process.returncode == 0, child.output()[-3000:]
    return [(e["success"], e["steps"]) for e in json.loads(results.read_text())]


def test_episodes_through_the_bridge_go_as_without_it(tmp_path: Path) -> None:
    graph = RosGraph(tmp_path)
    try:
        server, port = free_port(), free_port()
        graph.cli("server", "serve", POLICY, "--port", str(server))
        graph.cli("sim", "robot", "sim", "lockstep=true", "image_format=png", "--master", graph.master.uri)
        start_bridge(graph, port)
        bridged = outcomes(graph, "bridged", server, through(port))
        direct = outcomes(graph, "direct", server, f"transport.master={graph.master.uri}")
    finally:
        graph.close()
    print(bridged, direct)
    assert sum(a == b for a, b in zip(bridged, direct, strict=True)) >= 0.9 * NUM_EPISODES
