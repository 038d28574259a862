"""The contract of the kinematic arm, and its robot, opened and closed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract

CONTRACT = Path(__file__).with_name("kinematic_arm.yaml")


@contextmanager
def opened(contract: RobotContract) -> Iterator[TopicRobot]:
    robot = None
    transport = contract.transport.open()
    try:
        robot = TopicRobot(contract, transport, "reach")
        yield robot
    finally:
        transport.close()


def arm_contract(tmp_path: Path, *overrides: str) -> RobotContract:
    return load_contract(CONTRACT, [f"transport.settings.calibration_dir={tmp_path}", *overrides])
