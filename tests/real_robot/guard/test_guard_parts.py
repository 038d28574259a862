"""The guard's parts: small, its timing from the contract, whole actions out of messages, where it begins."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from memory_transport import MemoryTransport
from processes import ROOT
from virtual_time import VirtualTime

from real_robot.bridge.codec import read_action, write_action
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.channels import ActionSink
from real_robot.contract.load import load_contract
from real_robot.contract.safety import DimensionLimits, SafetyConfig
from real_robot.control.supervisor import Supervisor
from real_robot.guard.robot_guard import GuardedCommands, through_guard, timeout_of, without_cameras
from real_robot.transports.messages import JointState, Message, TwistStamped
from real_robot.types import Command, RobotObservation


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_is_small() -> None:
    """Beside a driver, on a robot's computer: no torch, no OpenCV, and up within seconds."""
    code = (
        "import time; begun = time.perf_counter()\n"
        "import real_robot.guard.robot_guard, json, re, sys\n"
        "big = [m for m in ('torch', 'cv2', 'pandas', 'pyarrow', 'lerobot', 'scipy', 'mujoco') if m in sys.modules]\n"
        "most = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
        "print(json.dumps([big, most, time.perf_counter() - begun]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout
    big, megabytes, seconds = json.loads(out)
    print(f"imports: {megabytes:.0f} MB, {seconds:.2f} s")
    assert not big and megabytes < 90 and seconds < 10


def test_it_brakes_after_four_ticks_or_as_told() -> None:
    assert timeout_of(load_contract("sim_robot")) == 0.2
    assert timeout_of(load_contract("sim_robot", ["guard.timeout=0.35"])) == 0.35
    with pytest.raises(ValueError, match=r"guard.timeout: 0.05 s is less than two control ticks"):
        load_contract("sim_robot", ["guard.timeout=0.05"])


def test_the_guarded_topics_are_the_drivers_with_the_suffix() -> None:
    contract = load_contract("sim_robot")
    assert [s.topic for s in through_guard(contract).action] == ["/gripper/command/guarded", "/twist_command/guarded"]
    seen = without_cameras(contract)
    assert not seen.observation.images and len(seen.observation.state) == 2 and seen.safety.command_timeout == 0.2


def test_goals_come_to_the_guard_as_numbers() -> None:
    contract = load_contract(ROOT / "tests/real_robot/transports/ros/actions.yaml")
    sinks = through_guard(contract).action
    assert {s.type for s in sinks} == {"std_msgs/Float64MultiArray"} and not any(s.is_goal for s in sinks)
    transport = MemoryTransport()
    commands = GuardedCommands(contract, transport)
    asked = np.array([0.02, 0.5, -0.5, 1], np.float32)
    for sink in sinks:
        transport.deliver(sink.topic, write_action(sink, asked, time.time_ns()))
    command = commands.next_action(0)
    assert command is not None
    np.testing.assert_array_equal(command.values, asked)


def twist(x: float, stamp: int) -> TwistStamped:
    return TwistStamped(stamp=stamp, linear=np.array([x, 0, 0]), angular=np.zeros(3))


def gripper(position: float, stamp: int) -> JointState:
    none = np.zeros(0)
    return JointState(stamp=stamp, name=("gripper",), position=np.array([position]), velocity=none, effort=none)


def test_a_command_is_whole_and_young_or_none(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual.install(monkeypatch, "real_robot")
    transport, told = MemoryTransport(), list[str]()
    contract = load_contract("sim_robot", ["guard.timeout=0.3"])
    commands = GuardedCommands(contract, transport, told.append)

    def send(*messages: Message) -> None:
        for message in messages:
            topic = "/twist_command" if isinstance(message, TwistStamped) else "/gripper/command"
            transport.deliver(f"{topic}/guarded", message)

    send(twist(0.1, virtual.time_ns()))
    assert commands.next_action(0) is None and not commands.poll(None).active, "the gripper is not known yet"
    virtual.sleep(0.01)
    now = virtual.time_ns()
    send(gripper(-1.0, now), twist(0.1, now))
    command = commands.next_action(0)
    assert command is not None and commands.poll(None).active
    np.testing.assert_allclose(command.values, [0.1, 0, 0, 0, 0, 0, -1], atol=1e-6)
    virtual.sleep(0.29)
    assert commands.next_action(0) is not None and commands.poll(None).active
    virtual.sleep(0.02)
    assert commands.next_action(0) is None and not commands.poll(None).active
    send(gripper(-1.0, now), twist(0.2, now))
    assert commands.next_action(0) is None, "one that was under way for too long"
    assert told == [
        "no whole command for 0.3 s: deploy rests, or is gone; the robot is braked",
        *(f"{t}/guarded: a command is refused: stale" for t in ("/gripper/command", "/twist_command")),
    ]


def test_after_a_clock_jump_a_reset_takes_commands_again() -> None:
    """As it takes observations: the guard need not be started anew."""
    transport, jump = MemoryTransport(), [0]
    contract = load_contract("sim_robot")
    robot = TopicRobot(without_cameras(contract), transport, wall=lambda: time.time_ns() + jump[0])
    commands = GuardedCommands(contract, transport, header_clock=robot.header_clock)
    jump[0] = 3600 * 10**9
    for _ in range(2):
        now = time.time_ns() + jump[0]
        transport.deliver("/gripper/command/guarded", gripper(-1.0, now))
        transport.deliver("/twist_command/guarded", twist(0.1, now))
        found = commands.next_action(0)
        robot.flush()
    assert found is not None


def test_the_axis_angle_of_a_pose_stays_near_the_one_before() -> None:
    """A gripper that points down is at +pi and at -pi: a limiter must not swing it round through the other way."""
    sink = ActionSink(topic="/pose", type="geometry_msgs/PoseStamped", indices=tuple(range(6)))
    before = np.array([0.4, 0, 0.3, np.pi - 0.01, 0, 0], np.float32)
    for angle in (np.pi - 0.005, np.pi + 0.02):
        asked = np.array([0.4, 0, 0.3, angle, 0, 0], np.float32)
        read = read_action(sink, write_action(sink, asked, 1), near=before)
        np.testing.assert_allclose(read, asked, atol=1e-5)


@pytest.mark.parametrize("angle", [3.0, 3.2])
def test_a_first_commanded_pose_of_a_gripper_that_points_down_does_not_swing_it_round(angle: float) -> None:
    """Of the two axis-angles of a first command, and of the first after a reset, it takes the one near the robot's."""
    contract = load_contract("sim_robot")
    sink = ActionSink(topic="/pose", type="geometry_msgs/PoseStamped", indices=(0, 1, 2, 3, 4, 5))
    grip = ActionSink(topic="/grip", type="std_msgs/Bool", indices=(6,))
    bounds = {"kind": "position", "low": -4, "high": 4, "max_velocity": 1}
    names = ("x", "y", "z", "rx", "ry", "rz")
    poses = [DimensionLimits.model_validate({"name": n, "state": i, **bounds}) for i, n in enumerate(names)]
    safety = contract.safety.model_copy(update={"dimensions": (*poses, contract.safety.dimensions[6])})
    turned = contract.model_copy(update={"action": (sink, grip), "safety": safety})
    transport = MemoryTransport()
    commands = GuardedCommands(turned, transport)
    asked = np.array([0, 0, 0.1, angle, 0, 0, 1], np.float32)
    for _ in range(2):
        for told in through_guard(turned).action:
            transport.deliver(told.topic, write_action(told, asked, time.time_ns()))
        command = commands.next_action(0)
        assert command is not None
        np.testing.assert_allclose(command.values, asked, atol=1e-5)
        commands.reset()


def test_it_begins_where_the_robot_is_after_a_silence() -> None:
    """An arm that was moved by hand is not driven back to where it was last told to be."""
    limits = {"name": "j", "kind": "position", "low": -2, "high": 2, "max_velocity": 1, "state": 0}
    now = [100.0]
    supervisor = Supervisor(
        SafetyConfig.model_validate({"control_hz": 10, "dimensions": [limits]}), clock=lambda: now[0]
    )

    def tick(measured: float, asked: float) -> float:
        now[0] += 0.1
        supervisor.observe(RobotObservation({}, np.array([measured], np.float32), "", now[0]))
        sent = supervisor.filter(Command(np.array([asked], np.float32), "policy", now[0])).values
        assert sent is not None
        return float(sent[0])

    assert tick(0.0, 1.0) == pytest.approx(0.1)
    for _ in range(3):
        now[0] += 0.1
        supervisor.filter(None)
    supervisor.reseed()
    now[0] += 0.1
    supervisor.filter(None)
    now[0] += 1.0
    assert supervisor.filter(None).values is None, "nothing is sent until it is known where the robot is"
    assert tick(-1.0, -1.0) == pytest.approx(-1.0)
