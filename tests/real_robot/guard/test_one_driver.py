"""One driver for a robot, with real processes on a real ROS 1 graph; a stop anywhere stops all."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import RATE, Deployment
from processes import Child, RosGraph, missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]

# Claims a robot, says "held" or why not, and publishes on its topic while it holds it.
CLAIM = """
import sys, time
from contextlib import ExitStack
from real_robot.contract.load import load_contract
from real_robot.transports.messages import TwistStamped
from real_robot.transports.base import QosConfig
from real_robot.guard.robot_lock import RobotBusyError, claim
contract = load_contract("sim_robot", [f"transport.master={sys.argv[1]}"])
transport = contract.transport.open()
with ExitStack() as stack:
    stack.callback(transport.close)
    print("ready", flush=True)
    time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
    try:
        lock = claim(contract, transport, "deploy", lambda text: print(text, flush=True), stack)
    except RobotBusyError as error:
        print("refused:", error, flush=True)
        sys.exit(3)
    print("held", time.time(), flush=True)
    transport.advertise("/twist_command", TwistStamped, QosConfig())
    while True:
        time.sleep(0.05)
        if stop := lock.poll(None).stop:
            print("stop:", stop, flush=True)
"""


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[RosGraph]:
    graph = RosGraph(tmp_path)
    yield graph
    graph.close()


def claimant(graph: RosGraph, name: str, at: float = 0.0) -> Child:
    return graph.start(name, "-c", CLAIM, graph.master.uri, str(at))


def decided(child: Child) -> bool:
    return "held" in child.output() or "refused" in child.output()


@pytest.mark.parametrize("attempt", range(4))
def test_of_four_that_start_at_once_exactly_one_drives(graph: RosGraph, attempt: int) -> None:
    at = time.time() + 6.0
    children = [claimant(graph, f"claim{i}", at + 0.3 * attempt * i) for i in range(4)]
    until(lambda: all(decided(child) for child in children), "the decisions", 60)
    held = [child for child in children if "held" in child.output()]
    assert len(held) == 1, [child.output() for child in children]
    for child in children:
        if child is not held[0]:
            assert f"process {held[0].process.pid}," in child.output(), "the one that drives is named"
            assert child.process.wait(20) == 3
    time.sleep(3)
    assert "stop:" not in held[0].output()


def test_a_killed_drivers_lease_expires(graph: RosGraph) -> None:
    first = claimant(graph, "first")
    until(lambda: first.says("held"), "the first")
    first.kill()
    second = claimant(graph, "second")
    until(lambda: second.says("held"), "the second", 20)


def test_a_driver_that_hangs_keeps_its_robot_and_stops_when_it_wakes(graph: RosGraph) -> None:
    """Its connections are open: when it wakes it would drive on."""
    first = claimant(graph, "first")
    until(lambda: first.says("held"), "the first")
    first.signal(signal.SIGSTOP)
    second = claimant(graph, "second")
    until(lambda: decided(second), "the decision", 60)
    assert "refused" in second.output() and "hangs" in second.output()
    first.signal(signal.SIGCONT)
    until(lambda: first.says("stop: this process stood still for"), "the stop", 10)


def test_a_publisher_that_is_none_of_ours(graph: RosGraph) -> None:
    code = (
        "import time; from real_robot.transports.ros.install import enable; enable(); import rospy\n"
        "from geometry_msgs.msg import TwistStamped; rospy.init_node('joystick')\n"
        "p = rospy.Publisher('/twist_command', TwistStamped, queue_size=1); print('up', flush=True); time.sleep(600)"
    )
    stranger = graph.start("joystick", "-c", code)
    until(lambda: stranger.says("up"), "the joystick")
    child = claimant(graph, "claim")
    until(lambda: decided(child), "the decision", 60)
    assert "refused" in child.output() and "/twist_command has another publisher, /joystick" in child.output()


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path)
    try:
        deployment.await_motion()
        yield deployment
    finally:
        deployment.close()


def test_a_second_deploy_is_refused_and_names_the_first(robot: Deployment) -> None:
    second = robot.graph.cli("second", *robot.command())
    robot.graph.children.remove(second)
    try:
        assert second.process.wait(60) == 2, second.output()[-3000:]
        said = re.search(
            r"driven already .*, by vla-rl deploy on (\S+), process (\d+), since (\d{4}-\S+ \S+)\.", second.output()
        )
        assert said and int(said[2]) == robot.deploy.process.pid
        robot.await_motion()
    finally:
        second.kill()


def test_a_stop_elsewhere_stops_it_and_a_reset_elsewhere_lets_it_go_on(robot: Deployment) -> None:
    """Another of this robot's processes says that a person has stopped it."""
    code = """
import sys, time
from real_robot.contract.load import load_contract
from real_robot.transports.messages import String
from real_robot.guard.robot_lock import TOPIC, new_lease
from real_robot.guard.robot_lock import QOS
contract = load_contract("sim_robot", [f"transport.master={sys.argv[1]}"])
transport = contract.transport.open()
publish = transport.advertise(TOPIC, String, QOS)
time.sleep(1.5)
lease = new_lease("robot guard", "x", ["/twist_command"])
print("pressed", time.monotonic(), flush=True)
publish(String(data=lease.model_copy(update={"state": "yields", "epoch": 5, "stopped": "a button"}).model_dump_json()))
sys.stdin.readline()
publish(String(data=lease.model_copy(update={"state": "yields", "epoch": 6}).model_dump_json()))
time.sleep(600)
"""
    other = robot.graph.start("other", "-c", code, robot.graph.master.uri)
    until(lambda: other.says("pressed"), "the button")
    pressed = float(other.output().split()[1])
    time.sleep(1.5)
    took = robot.last_motion() - pressed
    print(f"last motion after {1000 * took:.0f} ms")
    assert took < 2 / RATE + 0.35 and robot.mode() == "stopped"
    assert "a button, at vla-rl robot guard" in robot.deploy.output()
    robot.check_stands(time.monotonic(), 1.0)
    other.type("\n")
    robot.await_motion()
