"""One driver for a robot, with real processes on real graphs: ROS 1, ROS 2's rclpy, and its wire (cyclonedds)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, RosGraph, open_graph, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
GRAPHS = ["ros1", "rclpy", "ros2"]

# Claims a robot, says "held" or why not, and publishes on its topic while it holds it.
#   TRANSPORT AT ROLE TOPIC: at that time of the clock; TOPIC: of the robot's driver.
#   ALONE LATE: as if on a machine of its own, where the graph alone decides, and finds others' words, and over DDS the
#   others themselves, only so many seconds later. (ROS 1's master knows them before they begin.)
CLAIM = """
import sys, time
from contextlib import ExitStack
from real_robot.contract.load import load_contract
from real_robot.guard import robot_lock
from real_robot.guard.robot_lock import RobotBusyError, RobotLock, claim
from real_robot.transports.base import QosConfig
from real_robot.transports.messages import TwistStamped
transport, at, role, topic, alone, late = sys.argv[1:]
contract = load_contract("sim_robot", [transport])
first = contract.action[0].model_copy(update={"topic": topic})
contract = contract.model_copy(update={"action": (first,)})
found = {}
receive = RobotLock._receive
def later(self, message):
    lease = robot_lock.read_lease(message.data)
    if lease and time.monotonic() - found.setdefault(lease.id, time.monotonic()) >= float(late):
        receive(self, message)
RobotLock._receive = later
transport = contract.open_transport(role.replace(" ", "_"))
def publishers(topic, of=transport.other_publishers):
    names, now = of(topic) or [], time.monotonic()
    keys = [(topic, name, names[:i].count(name)) for i, name in enumerate(names)]
    return [key[1] for key in keys if now - found.setdefault(key, now) >= float(late)]
if "ros1" not in sys.argv[1]:
    transport.other_publishers = publishers
with ExitStack() as stack:
    stack.callback(transport.close)
    if alone:
        transport.graph = f"{transport.graph} {alone}"
    print("ready", flush=True)
    time.sleep(max(0.0, float(at) - time.time()))
    try:
        lock = claim(contract, transport, role, lambda text: print(text, flush=True), stack)
    except RobotBusyError as error:
        print("refused:", error, flush=True)
        sys.exit(3)
    print("held", time.time(), flush=True)
    transport.advertise(topic, TwistStamped, QosConfig())
    while True:
        time.sleep(0.05)
        if stop := lock.poll(None).stop:
            print("stop:", stop, flush=True)
"""


@pytest.fixture
def graph(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RosGraph]:
    graph = open_graph(request.param, tmp_path)
    yield graph
    graph.close()


def claimant(
    graph: RosGraph,
    name: str,
    at: float = 0.0,
    role: str = "deploy",
    topic: str = "/twist_command",
    alone: str = "",
    late: float = 0.0,
) -> Child:
    return graph.start(name, "-c", CLAIM, graph.transport, str(at), role, topic, alone, str(late))


def decided(child: Child) -> bool:
    return "held" in child.output() or "refused" in child.output()


MORE = [("ros1", 0.0), ("ros1", 0.3), ("ros1", 0.9), ("rclpy", 0.9), ("ros2", 0.0), ("ros2", 0.9)]


@pytest.mark.parametrize(
    ("graph", "apart"),
    [("rclpy", 0.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    indirect=["graph"],
)
def test_of_four_that_start_at_once_exactly_one_drives(graph: RosGraph, apart: float) -> None:
    at = time.time() + 6.0
    children = [claimant(graph, f"claim{i}", at + apart * i) for i in range(4)]
    until(lambda: all(decided(child) for child in children), "the decisions", 90)
    held = [child for child in children if "held" in child.output()]
    assert len(held) == 1, [child.output() for child in children]
    for child in children:
        if child is not held[0]:
            assert f"process {held[0].process.pid}," in child.output(), "the one that drives is named"
            assert child.process.wait(20) == 3
    time.sleep(3)
    assert "stop:" not in held[0].output()


NUM_PAIRS, AT_ONCE = int(os.environ.get("PAIRS", "10")), 5  # docs/safety.md's figures: 100


@pytest.mark.slow
@pytest.mark.timeout(300 + 40 * NUM_PAIRS)
@pytest.mark.parametrize("graph", GRAPHS, indirect=True)
def test_of_no_pair_do_both_drive_though_they_hear_each_other_late(graph: RosGraph) -> None:
    """As if each ran on a machine of its own, five pairs at a time (a busy machine); deploy, guarded or not.

    Of a pair none may drive, where a process stands still for seconds: the other does not hear it, and gives up.
    """
    rng, num_held = random.Random(time.time_ns()), 0
    for batch in range(NUM_PAIRS // AT_ONCE):
        pairs = list[list[Child]]()
        for pair in range(batch * AT_ONCE, (batch + 1) * AT_ONCE):
            roles = ("robot guard" if pair % 2 else "deploy", "deploy")
            at = time.time() + 15
            waits = (0.0, rng.choice((0.0, 8 * rng.random())))
            pairs.append(
                [
                    claimant(graph, f"pair{pair}_{role[:3]}{i}", at + wait, role, f"/twist{pair}", str(i), 5.0)
                    for i, (role, wait) in enumerate(zip(roles, waits, strict=True))
                ]
            )
        until(lambda pairs=pairs: all(decided(child) for pair in pairs for child in pair), "the decisions", 180)
        for pair in pairs:
            held = sum("held" in child.output() for child in pair)
            assert held <= 1, [child.output() for child in pair]
            num_held += held
        for child in [child for pair in pairs for child in pair]:
            graph.end(child)
        print(f"of {(batch + 1) * AT_ONCE} pairs on {graph.kind} {num_held} had one that drives, none two", flush=True)
    assert num_held > NUM_PAIRS / 2


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS, indirect=True)
def test_a_killed_drivers_lease_expires(graph: RosGraph) -> None:
    first = claimant(graph, "first")
    until(lambda: first.says("held"), "the first")
    first.kill()
    second = claimant(graph, "second")
    until(lambda: second.says("held"), "the second", 40)


@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS, indirect=True)
def test_a_driver_that_hangs_keeps_its_robot_and_stops_when_it_wakes(graph: RosGraph) -> None:
    """Its connections are open: when it wakes it would drive on."""
    first = claimant(graph, "first")
    until(lambda: first.says("held"), "the first")
    first.signal(signal.SIGSTOP)
    second = claimant(graph, "second")
    until(lambda: decided(second), "the decision", 60)
    assert "refused" in second.output() and ("hangs" in second.output() or "is not heard" in second.output())
    first.signal(signal.SIGCONT)
    until(lambda: first.says("stop: this process stood still for"), "the stop", 10)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ros1", "rclpy"], indirect=True)
def test_a_publisher_that_is_none_of_ours(graph: RosGraph) -> None:
    stranger = graph.node("joystick", "/twist_command")
    until(lambda: stranger.says("up"), "the joystick")
    child = claimant(graph, "claim")
    until(lambda: decided(child), "the decision", 60)
    assert "refused" in child.output() and "/twist_command has another publisher, /joystick" in child.output()
