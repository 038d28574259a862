"""The robot's model at work: an arm of LeRobot's in degrees, and one on a real ROS 1 graph, told to do harm."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from arm_contract import arm_contract, opened
from arm_trial import STOPPING, TIMEOUT, on_ros, running
from kinematic_arm import KinematicArm
from processes import json_lines, until
from urdfs import PLANAR
from virtual_time import VirtualTime

from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand
from real_robot.control.supervisor import Supervisor
from real_robot.kinematics.check import ModelCheck
from real_robot.types import RobotObservation

DEGREE = math.pi / 180
WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4


# --- LeRobot's arm, in this process -------------------------------------------------------------


class Person:
    """Active until told to finish."""

    finished = False

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return OperatorCommand(finished=self.finished)


def test_an_arm_in_degrees_is_stopped_before_the_wall(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The arm's numbers are degrees, the action's are radians in another order, and the file has no gripper."""
    virtual.install(monkeypatch, "real_robot", "real_robot.transports.lerobot", "kinematic_arm")
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
        thread = virtual.Thread(loop.run)
        thread.start()
        try:
            virtual.until(lambda: "wall" in supervisor.state.reason, "the refusal", 30)
        finally:
            person.finished = True
            thread.join(20)
        sent = np.array([[a["shoulder.pos"], a["elbow.pos"]] for a in arm.sent]) * DEGREE
        nearest = min(check.arm.distances(joints).get(("lower", "wall"), math.inf) for joints in sent)
        assert 0.01 <= nearest < 0.05, "near it, and not nearer than it may"


# --- an arm on a real graph ---------------------------------------------------------------------


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


# --- the same arm with a sensor at its wrist, which needs no model --------------------------------

WRENCH = {"topic": "/wrench", "max_force": 20, "max_torque": 5}


@on_ros
def test_a_force_beyond_its_limit(tmp_path: Path) -> None:
    with running(tmp_path, "2 2", WRENCH) as arm:
        until(lambda: arm.graph.check_alive() or len(arm.followed()) > 3, "motion")
        told = arm.tell("push 30")
        until(lambda: arm.deploy.says("force is 30 N, at most 20 is allowed"), "the hold")
        arm.await_stand()
        print(f"last motion {1000 * (arm.last_motion() - told):.0f} ms after the force was too large")
        assert arm.last_motion() - told < STOPPING
        until(lambda: arm.deploy.says("stopped: force is 30 N"), "the stop")


@on_ros
def test_a_wrench_that_is_published_no_more(tmp_path: Path) -> None:
    """The joints are published as before."""
    with running(tmp_path, "2 2", WRENCH) as arm:
        until(lambda: arm.graph.check_alive() or len(arm.followed()) > 3, "motion")
        told = arm.tell("numb")
        until(lambda: arm.deploy.says("/wrench has not shown force and torque for 0.4 s"), "the hold")
        arm.await_stand()
        print(f"last motion {1000 * (arm.last_motion() - told):.0f} ms after the last wrench")
        assert arm.last_motion() - told < TIMEOUT + STOPPING
