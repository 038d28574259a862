"""The robot's model at work: an arm of LeRobot's in degrees is told to do harm."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from arm_contract import arm_contract, opened
from kinematic_arm import KinematicArm
from urdfs import PLANAR
from virtual_time import VirtualTime

from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand
from real_robot.control.supervisor import Supervisor
from real_robot.kinematics.check import ModelCheck
from real_robot.types import RobotObservation

DEGREE = math.pi / 180
WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4


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
