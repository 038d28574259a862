"""What `vla-rl doctor ROBOT.yaml` says of the robot's URDF."""

from __future__ import annotations

from pathlib import Path

from urdfs import PLANAR, joint_contract

from real_robot.contract.load import load_contract
from real_robot.doctor.robot_check import check_model

JOINTS = ["shoulder", "elbow"]


def test_a_model_that_can_be_used_says_what_may_touch(tmp_path: Path) -> None:
    checks = check_model(load_contract(joint_contract(tmp_path, PLANAR, JOINTS)))
    assert [(c.name, c.status) for c in checks] == [("model", "ok")]
    assert checks[0].found == "robot.urdf: 2 joints, parts kept 0.01 m apart; neighbors: 1"


def test_a_mesh_that_is_missing_is_wrong(tmp_path: Path) -> None:
    urdf = PLANAR.replace('<box size="0.3 0.04 0.04"/>', '<mesh filename="package://arm/lower.stl"/>')
    check = check_model(load_contract(joint_contract(tmp_path, urdf, JOINTS)))[0]
    assert check.status == "wrong" and "package://arm/lower.stl not found" in check.found


def test_without_a_model_there_is_no_line() -> None:
    assert check_model(load_contract("so101")) == []
