"""The robot's model at work: an arm of LeRobot's in degrees, and one on a real ROS 1 graph, told to do harm."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_contract import arm_contract, opened
from kinematic_arm import KinematicArm
from processes import RosGraph, json_lines, missing_ros, until
from urdfs import PLANAR, joint_contract

from real_robot.bridge.contract import load_contract
from real_robot.bridge.ros.master import free_port
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand
from real_robot.control.safety import Supervisor
from real_robot.kinematics.arm_model import ArmModel
from real_robot.kinematics.check import ModelCheck
from real_robot.types import RobotObservation

DEGREE = math.pi / 180
WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4


JOINTS = ["shoulder", "elbow"]
RATE, TIMEOUT = 10, 0.4
STOPPING = 0.6  # braking takes 125 ms and a tick of 100 ms; the rest is a busy machine's


def on_ros(test: Callable[..., None]) -> Callable[..., None]:
    missing = missing_ros()
    skip = pytest.mark.skipif(bool(missing), reason=missing or "ROS 1 is there")
    return pytest.mark.slow(pytest.mark.timeout(400)(skip(test)))


# --- LeRobot's arm, in this process -------------------------------------------------------------


class Person:
    """Active until told to finish."""

    finished = False

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return OperatorCommand(finished=self.finished)


def test_an_arm_in_degrees_is_stopped_before_the_wall(tmp_path: Path) -> None:
    """The arm's numbers are degrees, the action's are radians in another order, and the file has no gripper."""
    (tmp_path / "arm.urdf").write_text(PLANAR)
    joints = [f'"{n}.pos": {{joint: {n}, scale: {DEGREE}}}' for n in ("shoulder", "elbow")]
    contract = arm_contract(
        tmp_path,
        f"model={{file: {tmp_path / 'arm.urdf'}, joints: {{gripper.pos: null, {', '.join(joints)}}}, boxes: [{WALL}]}}",
    )
    _, shoulder, elbow = contract.safety.dimensions
    assert (shoulder.low, shoulder.high, elbow.high) == (-1, 1, 1), "within the file's already"
    check, person = ModelCheck(contract), Person()
    with opened(contract) as robot:
        arm = KinematicArm.made[-1]
        supervisor = Supervisor(contract.safety, motion_checks=[check], state_checks=[check])
        actions = SynchronousActions(lambda observation: np.array([[0.5, 1.0, 0.8]], np.float32))
        loop = ControlLoop(robot, actions, supervisor, person, ClockPacer(contract.rate), silence=5.0)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        try:
            until(lambda: "wall" in supervisor.state.reason, "the refusal", 30)
        finally:
            person.finished = True
            thread.join(20)
        sent = np.array([[a["shoulder.pos"], a["elbow.pos"]] for a in arm.sent]) * DEGREE
        nearest = min(check.arm.distances(joints).get(("lower", "wall"), math.inf) for joints in sent)
        assert 0.01 <= nearest < 0.05, "near it, and not nearer than it may"


# --- an arm on a real graph ---------------------------------------------------------------------


class Arm:
    """Master, arm, policy server and deploy, each a process; what the arm followed is in `trace`."""

    def __init__(self, folder: Path, goal: str, **model: Any) -> None:
        self.graph, self.folder = RosGraph(folder), folder
        self.trace, self.ticks = folder / "trace.jsonl", folder / "ticks.jsonl"
        state = {
            "topic": "/joint_states",
            "type": "sensor_msgs/JointState",
            "joints": JOINTS,
            "align": {"tolerance": 0.5},
        }
        observation = {"max_age": TIMEOUT, "state": [state]}
        path = joint_contract(
            folder,
            PLANAR,
            JOINTS,
            rate=RATE,
            transport={"kind": "ros1", "master": self.graph.master.uri},
            observation=observation,
            safety={"observation_timeout": TIMEOUT, "command_timeout": TIMEOUT},
            model=model,
        )
        section = load_contract(path).model
        assert section is not None, "it has one"
        self.model = ArmModel(section, Path(section.file))
        node = self.graph.start("arm", "tests/real_robot/arm_node.py", str(self.trace))
        port = free_port()
        self.graph.start("server", "tests/real_robot/light_server.py", str(port), f"reach {goal}")
        until(lambda: node.says("ready"), "the arm")
        options = ["--server", f"127.0.0.1:{port}", "--instruction", "go", "--log", str(self.ticks)]
        self.deploy = self.graph.cli("deploy", "deploy", str(path), *options)
        until(lambda: self.deploy.says("arm: waiting for"), "deploy")
        self.deploy.type("\n")

    def followed(self) -> list[dict[str, Any]]:
        return [line for line in json_lines(self.trace) if "joints" in line]

    def last_motion(self) -> float:
        """When the arm was last told to be elsewhere than before."""
        lines = self.followed()
        moved = [b["time"] for a, b in pairwise(lines) if a["joints"] != b["joints"]]
        return max(moved)

    def await_stand(self) -> None:
        """Wait until the arm has not moved for half a second."""
        until(lambda: self.graph.check_alive() or time.monotonic() - self.last_motion() > 0.5, "standing")

    def tell(self, fault: str) -> float:
        """Say it on /fault. Returns when the arm heard it."""
        code = f"""from real_robot.bridge.ros.install import enable
enable()
import rospy, time
from std_msgs.msg import String
rospy.init_node("fault")
publisher = rospy.Publisher("/fault", String, queue_size=1, latch=True)
publisher.publish({fault!r})
time.sleep(5)
"""
        child = self.graph.start("fault", "-c", code)
        lines = until(lambda: [x for x in json_lines(self.trace) if x.get("fault") == fault], "the fault")
        child.kill()
        return lines[0]["time"]

    def close(self) -> None:
        self.graph.close()

    def nearest(self) -> float:
        """Smallest distance of the lower link to the wall, of all set-points that the arm followed."""
        joints = [np.array(line["joints"]) for line in self.followed()]
        return min(self.model.distances(j).get(("lower", "wall"), math.inf) for j in joints)


@contextmanager
def running(folder: Path, goal: str, **model: Any) -> Iterator[Arm]:
    arm = Arm(folder, goal, **model)
    try:
        yield arm
    finally:
        arm.close()


@on_ros
def test_a_policy_that_asks_into_a_wall(tmp_path: Path) -> None:
    with running(tmp_path, "1.2 0", boxes=[WALL]) as arm:
        until(lambda: arm.graph.check_alive() or arm.deploy.says("wall, at least"), "the refusal")
        arm.await_stand()
        refused = next(line for line in json_lines(arm.ticks) if "model" in line["limited"])
        print(f"last motion {1000 * (arm.last_motion() - refused['time']):.0f} ms after the first refused tick")
        assert 0.01 <= arm.nearest() < 0.1
        assert arm.last_motion() - refused["time"] < STOPPING


@on_ros
def test_an_effort_beyond_its_limit(tmp_path: Path) -> None:
    with running(tmp_path, "2 2", joint_states="/joint_states", max_effort={"elbow": 5}) as arm:
        until(lambda: arm.graph.check_alive() or len(arm.followed()) > 3, "motion")
        told = arm.tell("effort 9")
        until(lambda: arm.deploy.says("effort of elbow is 9, at most 5 is allowed"), "the hold")
        arm.await_stand()
        print(f"last motion {1000 * (arm.last_motion() - told):.0f} ms after the effort was too large")
        assert arm.last_motion() - told < STOPPING
        until(lambda: arm.deploy.says("stopped: effort of elbow is 9"), "the stop")


@on_ros
def test_joints_that_are_published_no_more(tmp_path: Path) -> None:
    with running(tmp_path, "2 2", joint_states="/joint_states", max_effort={"elbow": 5}) as arm:
        until(lambda: arm.graph.check_alive() or len(arm.followed()) > 3, "motion")
        told = arm.tell("mute")
        arm.await_stand()
        print(f"last motion {1000 * (arm.last_motion() - told):.0f} ms after the last joint state")
        assert arm.last_motion() - told < TIMEOUT + STOPPING
        assert arm.deploy.says("holding: ")
