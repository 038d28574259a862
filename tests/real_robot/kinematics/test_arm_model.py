"""Distances, Jacobians and the pairs that are not kept apart, against what is known by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from urdfs import PLANAR, seven_joints

from real_robot.contract.model import ModelConfig
from real_robot.kinematics.arm_model import ArmModel, quaternion_of
from vla_rl.config import ConfigError, validate


def model(tmp_path: Path, urdf: str = PLANAR, **options: Any) -> ArmModel:
    path = tmp_path / "robot.urdf"
    path.write_text(urdf)
    return ArmModel(validate(ModelConfig, {"file": str(path), **options}), path)


def test_distance_to_a_box_is_the_gap(tmp_path: Path) -> None:
    arm = model(tmp_path, boxes=[{"name": "wall", "center": [1.0, 0, 0], "size": [0.5, 1, 1]}])  # its face at x = 0.75
    assert arm.distances(np.zeros(2)) == {("lower", "wall"): pytest.approx(0.05, abs=1e-6)}
    assert arm.distances(np.array([0.0, 0.5])) == {}  # more than min_distance + 5 cm away


def test_a_turned_box_and_a_plane(tmp_path: Path) -> None:
    turned = {"name": "bar", "center": [0.9, 0, 0], "size": [0.1, 0.1, 1], "turn": [0, 0, math.pi / 4]}
    plane = {"name": "floor", "point": [0, 0, -0.05], "normal": [0, 0, 2]}
    arm = model(tmp_path, boxes=[turned], planes=[plane], min_distance=0.1)
    distances = arm.distances(np.zeros(2))
    assert distances["bar", "lower"] == pytest.approx(0.2 - 0.05 * math.sqrt(2), abs=1e-6)
    assert distances["floor", "lower"] == distances["floor", "upper"] == pytest.approx(0.03, abs=1e-6)


def test_roll_pitch_yaw_are_as_in_a_urdf(tmp_path: Path) -> None:
    turn = [0.3, -0.7, 1.1]
    rpy = " ".join(map(str, turn))
    box = '<collision><geometry><box size="0.1 0.2 0.3"/></geometry></collision>'
    link = f'<link name="twin">{box}</link><joint name="weld" type="fixed"><parent link="base"/><child link="twin"/>'
    urdf = PLANAR.replace("</robot>", f'{link}<origin xyz="0 0 1" rpy="{rpy}"/></joint></robot>')
    arm = model(tmp_path, urdf)
    w, x, y, z = quaternion_of(turn)
    matrix = Rotation.from_quat([x, y, z, w]).as_matrix()
    np.testing.assert_allclose(arm.rotation(np.zeros(2), arm.link("twin")), matrix, atol=1e-9)


def test_neighbors_are_ignored_also_past_links_without_a_shape(tmp_path: Path) -> None:
    arm = model(tmp_path)
    assert arm.pairs.neighbors == {("lower", "upper")}
    empty = seven_joints(
        '<link name="flange"/><joint name="f" type="fixed"><parent link="link7"/><child link="flange"/></joint>'
        '<link name="cup"><collision><geometry><sphere radius="0.01"/></geometry></collision></link><joint name="c" '
        'type="continuous"><parent link="flange"/><child link="cup"/><origin xyz="0 0 0.3"/></joint>'
    )
    assert ("cup", "link7") in model(tmp_path, empty).pairs.neighbors


def test_fingers_may_close_on_each_other_but_not_on_the_arm(tmp_path: Path) -> None:
    shape = '<collision><geometry><box size="0.01 0.02 0.05"/></geometry></collision>'
    limit = '<limit lower="0" upper="0.04" velocity="0.2" effort="20"/>'
    joint = '<joint name="{0}" type="prismatic"><parent link="hand"/><child link="{1}"/><axis xyz="{2} 0 0"/>'
    joint += "{3}</joint>"
    mimic = f'{limit}<mimic joint="left"/>'
    fingers = "".join(f'<link name="{name}">{shape}</link>' for name in ("one", "other"))
    fingers += joint.format("left", "one", "1", limit) + joint.format("right", "other", "-1", mimic)
    arm = model(tmp_path, seven_joints(fingers))
    assert arm.pairs.fingers == {("one", "other")} and "fingers: one/other" in arm.summary()
    assert ("link6", "one") not in arm.pairs.ignored
    alone = joint.format("left", "one", "1", limit) + joint.format("right", "other", "-1", limit)
    both = model(tmp_path, seven_joints(fingers[: fingers.index("<joint")] + alone))
    assert not both.pairs.fingers, "two joints of their own: `allowed` says what they may"


def test_links_that_touch_in_the_neutral_pose_are_ignored_and_those_that_are_near_only_must_not_touch(
    tmp_path: Path,
) -> None:
    collar = seven_joints().replace('radius="0.04" length="0.14"', 'radius="0.04" length="0.40"')
    arm = model(tmp_path, collar)  # each cylinder reaches into the next but one
    assert ("link1", "link3") in arm.pairs.touching and ("link1", "link2") in arm.pairs.neighbors
    assert ("link1", "link6") not in arm.pairs.ignored
    near = model(tmp_path, seven_joints(), min_distance=0.2)
    assert ("link1", "link3") in near.pairs.close and not near.pairs.touching
    told = model(tmp_path, seven_joints(), neutral={"joint2": 2.5, "joint4": 2.5})  # folded into itself
    assert told.pairs.touching
    assert "touch in the neutral pose: link" in told.summary()


def test_links_that_always_touch_are_ignored(tmp_path: Path) -> None:
    ball = '<collision><geometry><sphere radius="0.35"/></geometry></collision>'
    urdf = PLANAR.replace('<link name="base"/>', f'<link name="base">{ball}</link>')
    arm = model(tmp_path, urdf, neutral={"elbow": 0.0})
    assert ("base", "lower") not in arm.pairs.ignored  # only where the arm folds back
    everywhere = model(tmp_path, urdf.replace("0.35", "0.75"))
    assert ("base", "lower") in everywhere.pairs.ignored


def test_the_cell_is_never_ignored_by_itself_but_on_demand(tmp_path: Path) -> None:
    table = {"name": "table", "center": [0.35, 0, -0.1], "size": [1, 1, 0.2]}
    arm = model(tmp_path, boxes=[table])
    assert arm.distances(np.zeros(2))["table", "upper"] < 0
    allowed = model(tmp_path, boxes=[table], allowed=[["table", "upper"]])
    assert set(allowed.distances(np.zeros(2))) == {("lower", "table")}


def test_the_jacobian_is_the_slope_of_the_position(tmp_path: Path) -> None:
    arm = model(tmp_path, seven_joints())
    joints = np.random.default_rng(1).uniform(-1, 1, 7)
    link, step = arm.link("hand"), 1e-6
    jacobian = arm.jacobian(joints, link)
    slope = [
        (arm.position(joints + step * e, link) - arm.position(joints - step * e, link)) / (2 * step) for e in np.eye(7)
    ]
    np.testing.assert_allclose(jacobian[:3], np.array(slope).T, atol=1e-8)
    assert np.linalg.norm(jacobian[3:], axis=0) == pytest.approx(1.0)


def test_no_point_moves_farther_than_told(tmp_path: Path) -> None:
    arm, generator = model(tmp_path, seven_joints()), np.random.default_rng(2)
    for _ in range(200):
        start, change = generator.uniform(-2, 2, 7), generator.uniform(-0.5, 0.5, 7)
        for link in ("link4", "hand"):
            moved = arm.position(start + change, arm.link(link)) - arm.position(start, arm.link(link))
            assert np.linalg.norm(moved) <= arm.farthest(change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed": [["upper", "tabel"]]}, "model.allowed: 'tabel'; solid are: lower, upper"),
        ({"neutral": {"sholder": 0}}, "joint 'sholder'; .* has: shoulder, elbow"),
        ({"boxes": [{"name": "upper", "center": [0, 0, 0], "size": [1, 1, 1]}]}, "a link of the file has that name"),
        ({"boxes": [{"name": "b", "center": [0, 0, 0], "size": [1, 0, 1]}]}, "lengths above 0"),
        ({"planes": [{"name": "b", "point": [0, 0, 0], "normal": [0, 0, 0]}]}, "a direction, got"),
        ({"planes": [{"name": "b", "point": [0, 0, 0]}, {"name": "b", "point": [1, 0, 0]}]}, "names must differ"),
        ({"max_effort": {"elbow": 3}}, "model.joint_states; name its topic"),
        ({"min_distance": -1}, "min_distance"),
    ],
)  # fmt: skip
def test_a_wrong_section_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(tmp_path, **options)
