"""Limits of joint commands from the robot's file, in `load_contract`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from urdfs import PLANAR, joint_contract

from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from vla_rl.config import ConfigError

JOINTS = ["shoulder", "elbow"]


def contract(tmp_path: Path, **sections: Any) -> RobotContract:
    return load_contract(joint_contract(tmp_path, PLANAR, JOINTS, **sections))


def position(name: str, state: int, **limits: Any) -> dict[str, Any]:
    return {"name": name, "kind": "position", "state": state, **limits}


def test_limits_wider_than_the_file_s_are_cut_to_it_less_the_margin(tmp_path: Path) -> None:
    dims = [
        position("s", 0, low=-3, high=1, max_velocity=9),
        position("e", 1, low=-1, high=3, max_velocity=1, start=None),
    ]
    shoulder, elbow = contract(tmp_path, safety={"dimensions": dims}).safety.dimensions
    assert (shoulder.low, shoulder.high, shoulder.max_velocity) == (pytest.approx(-1.95), 1, 1.5)
    assert (elbow.low, elbow.high, elbow.max_velocity) == (-1, pytest.approx(2.75), 1)


def test_limits_that_are_left_out_are_the_file_s(tmp_path: Path) -> None:
    dims = [position("s", 0), position("e", 1, max_step=0.01)]
    model = {"margin": 0.1, "margins": {"shoulder": 0}}
    shoulder, elbow = contract(tmp_path, safety={"dimensions": dims}, model=model).safety.dimensions
    assert (shoulder.low, shoulder.high, shoulder.max_velocity) == (-2.0, 2.5, 1.5)
    assert (elbow.low, elbow.high, elbow.max_velocity, elbow.max_step) == (
        pytest.approx(-2.7),
        pytest.approx(2.7),
        2.0,
        0.01,
    )


def test_in_degrees_and_backwards(tmp_path: Path) -> None:
    """The action is in degrees; its sink makes radians of it, for a driver that counts the elbow the other way."""
    degree = math.pi / 180
    action = [
        {"topic": "/command", "type": "trajectory_msgs/JointTrajectory", "joints": ["s", "e"], "indices": [1, 0],
         "convert": {"scale": [degree, 10 * degree]}}
    ]  # fmt: skip
    joints = {"s": "shoulder", "e": {"joint": "elbow", "scale": -0.1, "offset": 0.5}}
    dims = [
        position("e", 1, low=-360, high=360, max_velocity=9e3),
        position("s", 0, low=-360, high=360, max_velocity=9e3),
    ]
    state = [{"topic": "/joint_states", "type": "sensor_msgs/JointState", "joints": ["s", "e"]}]
    elbow, shoulder = contract(
        tmp_path, action=action, observation={"state": state}, safety={"dimensions": dims}, model={"joints": joints}
    ).safety.dimensions
    assert (shoulder.low, shoulder.high) == (pytest.approx(-1.95 / degree), pytest.approx(2.45 / degree))
    assert shoulder.max_velocity == pytest.approx(1.5 / degree)
    assert (elbow.low, elbow.high) == (pytest.approx((0.5 - 2.75) / degree), pytest.approx((0.5 + 2.75) / degree))
    assert elbow.max_velocity == pytest.approx(2.0 / degree)


def test_joint_velocities_are_cut_to_the_file_s(tmp_path: Path) -> None:
    action = [{"topic": "/velocity", "type": "std_msgs/Float64MultiArray", "indices": [0, 1]}]
    dims = [{"name": "s", "kind": "velocity"}, {"name": "e", "kind": "velocity", "low": -0.5, "high": 3}]
    shoulder, elbow = contract(
        tmp_path, action=action, safety={"dimensions": dims}, model={"commands": {0: "shoulder", 1: "elbow"}}
    ).safety.dimensions
    assert (shoulder.low, shoulder.high, elbow.low, elbow.high) == (-1.5, 1.5, -0.5, 2.0)


POSES = {
    "action": [{"topic": "/pose", "type": "geometry_msgs/PoseStamped", "indices": list(range(6))}],
    "safety": {"dimensions": [position(name, 0) for name in ("x", "y", "z", "rx", "ry", "rz")]},
}
EMPTY = {"safety": {"dimensions": [position("s", 0), position("e", 1)]}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"file": "missing.urdf"}}, "missing.urdf cannot be read"),
        ({"model": {"margin": 2.3}}, r"shoulder: margin 2.3 leaves nothing of joint shoulder's range -2..2.5"),
        ({"model": {"joints": {"elbow": "wrist"}}}, "no joint 'wrist' of its own; it has: shoulder, elbow"),
        ({"model": {"joints": {"elbow": None}}, **EMPTY}, "e: low is missing"),
        ({"model": {"joints": {"elbow": "shoulder"}}}, "joint shoulder stands for two numbers"),
        (POSES, r"model: /pose takes poses .geometry_msgs/PoseStamped., .*command joints or twists"),
        ({"model": {"commands": {2: "elbow"}}}, "model.commands: 2: the contract has the numbers 0 to 1"),
        ({"safety": {"dimensions": [position("s", 0, low=2.6), position("e", 1)]}}, "s: low 2.6 must be below"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        contract(tmp_path, **sections)


def test_without_a_model_nothing_is_filled_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="low"):
        contract(tmp_path, **EMPTY, model=None)
