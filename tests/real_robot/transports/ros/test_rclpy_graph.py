"""Deploy on a real ROS 2 graph: rclpy of Jazzy on Fast DDS, the simulated robot as a node; trials of docs/safety.md.

One deployment goes through all trials, in their order. ROS 2 has an environment of its own (`make setup-dev`).
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import RATE, Deployment
from processes import ROOT, Child, Ros2Graph, json_lines, missing_ros2, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_ros2()), reason=missing_ros2() or "ROS 2 is there"),
]

PRESS = """
import sys, time
from real_robot.transports.base import QosConfig
from real_robot.transports.messages import Bool
from real_robot.transports.rclpy_node import RclpyConfig
transport = RclpyConfig().open("button")
publish = transport.advertise("/stop", Bool, QosConfig(depth=10))
while not transport.has_listener("/stop"):
    time.sleep(0.02)
print("ready", flush=True)
for pressed in (True, False):
    sys.stdin.readline()
    print("pressed" if pressed else "released", time.monotonic(), flush=True)
    publish(Bool(data=pressed))
time.sleep(600)
"""
CLAIM = """
import sys
from contextlib import ExitStack
from real_robot.contract.load import load_contract
from real_robot.guard.robot_lock import RobotBusyError, claim
contract = load_contract("sim_robot", ["transport={kind: rclpy}"])
other = [c.model_copy(update={"topic": f"/claimed{i}"}) for i, c in enumerate(contract.action)]
contract = contract.model_copy(update={"action": tuple(other)})  # of another robot than the one that is deployed
with ExitStack() as stack:
    transport = contract.open_transport(sys.argv[1])
    stack.callback(transport.close)
    transport.graph = f"alone {sys.argv[1]}"  # as if on another machine: the graph alone decides
    try:
        claim(contract, transport, "deploy", print, stack)
    except RobotBusyError as error:
        sys.exit(f"refused: {error}")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("ros2")
    deployment = Deployment(folder, graph=Ros2Graph(folder))
    try:
        deployment.await_motion()
        yield deployment
    finally:
        deployment.close()


def test_the_transport_on_a_real_rclpy(tmp_path: Path) -> None:
    graph = Ros2Graph(tmp_path)
    command = [graph.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-o", "addopts="]
    done = subprocess.run(
        [*command, "tests/real_robot/transports/ros/inside_ros2.py"],
        cwd=ROOT, env=graph.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]


def test_of_two_that_claim_a_robot_at_once_one_gets_it(robot: Deployment) -> None:
    both = [robot.graph.start(name, "-c", CLAIM, name) for name in ("one", "two")]
    until(lambda: any("refused" in child.output() for child in both), "the refusal", 40)
    (held,) = [child for child in both if "held" in child.output()]
    (other,) = [child for child in both if child is not held]
    assert f"process {held.process.pid}," in other.output()
    for child in both:
        robot.graph.children.remove(child)
        child.kill()


def test_a_second_deploy_is_refused_and_names_the_first(robot: Deployment) -> None:
    second = robot.graph.cli("second", *robot.command())
    robot.graph.children.remove(second)
    try:
        assert second.process.wait(60) == 2, second.output()[-3000:]
        said = re.search(r"driven already .*, by vla-rl deploy on \S+, process (\d+), since", second.output())
        assert said and int(said[1]) == robot.deploy.process.pid
        robot.await_motion()
    finally:
        second.kill()


def pressed_at(button: Child, word: str) -> float:
    button.type("\n")
    until(lambda: button.says(word), word)
    return float(button.output().split(word)[1].split()[0])


def test_a_stop_topic_stops_it_until_a_reset(robot: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    button = robot.graph.start("button", "-c", PRESS)
    until(lambda: button.says("ready"), "the button's listener")
    robot.await_motion()
    pressed = pressed_at(button, "pressed")
    until(lambda: robot.mode() == "stopped", "the stop")
    time.sleep(0.5)
    took = robot.last_motion() - pressed
    with capsys.disabled():
        print(f"\nstop topic: last motion after {1000 * took:.0f} ms")
    assert took < 2 / RATE + 0.35
    robot.check_stands(time.monotonic(), 1.0)
    robot.deploy.type("r")
    until(lambda: robot.deploy.says("no reset while it lasts: stop topic"), "the refusal")
    pressed_at(button, "released")
    robot.reset()


def test_a_robot_that_hangs_is_held_and_goes_on(robot: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    since = time.monotonic()
    robot.sim.signal(signal.SIGSTOP)
    until(lambda: robot.mode() in ("holding", "stopped"), "the hold", 3)
    moving = [t["time"] for t in json_lines(robot.ticks) if t["sent"] and np.any(t["sent"][:6])]
    with capsys.disabled():
        print(f"\nrobot hangs: last motion after {1000 * (max(moving) - since):.0f} ms")
    assert max(moving) - since < 0.5 + 2 / RATE + 0.2
    robot.sim.signal(signal.SIGCONT)
    robot.await_motion()


def test_the_server_is_killed_and_comes_back(robot: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    since = time.monotonic()
    robot.server.kill()
    robot.graph.children.remove(robot.server)
    until(lambda: robot.mode() == "stopped", "the stop", 10)
    took = robot.last_motion() - since
    with capsys.disabled():
        print(f"\nserver killed: last motion after {1000 * took:.0f} ms")
    assert took < 2 / RATE + 0.35
    until(lambda: robot.deploy.says("no action for"), "the reason", 10)
    robot.server = robot.start_server()
    robot.reset()


def test_sigterm_brakes_and_ends(robot: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    since = time.monotonic()
    assert robot.deploy.end() == 128 + signal.SIGTERM
    robot.graph.children.remove(robot.deploy)
    time.sleep(0.5)
    took = robot.last_motion() - since
    with capsys.disabled():
        print(f"\nSIGTERM: last motion after {1000 * took:.0f} ms")
    assert took < 2 / RATE + 0.35 and "the robot was told to stand" in robot.deploy.output()
    robot.check_records()
