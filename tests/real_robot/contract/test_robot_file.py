"""What is read of a URDF or an MJCF, on real files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from urdfs import PLANAR, seven_joints

from real_robot.contract.model import Box, ModelConfig
from real_robot.contract.robot_file import JointFacts, Mimic, read_joints
from real_robot.kinematics.arm_model import ArmModel
from vla_rl.config import ConfigError

FINGERS = """<link name="{stem}1"/><link name="{stem}2"/>
<joint name="finger1" type="prismatic"><parent link="link7"/><child link="{stem}1"/>
  <limit lower="0" upper="0.04" velocity="0.2" effort="20"/></joint>
<joint name="finger2" type="prismatic"><parent link="link7"/><child link="{stem}2"/><axis xyz="-1 0 0"/>
  <limit lower="0" upper="0.04" velocity="0.2" effort="20"/><mimic joint="finger1"/></joint>""".format(
    stem="finger_link"
)


def save(tmp_path: Path, text: str, name: str = "robot.urdf") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def box_stl(path: Path, size: float) -> None:
    """A cube as binary STL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)]) * size - size / 2
    faces = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    triangles = [corners[list(t)] for a, b, c, d in faces for t in ((a, b, c), (a, c, d))]
    rows = b"".join(struct.pack("<12fH", 0, 0, 0, *t.ravel(), 0) for t in triangles)
    path.write_bytes(b"\0" * 80 + struct.pack("<I", len(triangles)) + rows)


def test_limits_velocities_and_efforts_of_a_urdf(tmp_path: Path) -> None:
    joints = read_joints(save(tmp_path, PLANAR))
    assert joints == {"shoulder": JointFacts(-2.0, 2.5, 1.5, 40), "elbow": JointFacts(-2.8, 2.8, 2.0, 20)}


def test_soft_limits_endless_joints_and_zeros_for_unknown(tmp_path: Path) -> None:
    text = PLANAR.replace(
        'effort="40"/>', 'effort="0"/><safety_controller soft_lower_limit="-1.5" soft_upper_limit="9"/>'
    )
    text = text.replace('"elbow" type="revolute"', '"elbow" type="continuous"')
    joints = read_joints(save(tmp_path, text))
    assert joints["shoulder"] == JointFacts(-1.5, 2.5, 1.5, math.inf)
    assert joints["elbow"] == JointFacts(-math.inf, math.inf, 2.0, 20)


def test_mimic_joints_follow_and_are_no_joints_of_their_own(tmp_path: Path) -> None:
    path = save(tmp_path, seven_joints(FINGERS))
    assert read_joints(path)["finger2"].mimic == Mimic("finger1", 1.0, 0.0)
    arm = ArmModel(ModelConfig(file=str(path)), path)
    assert arm.joints == (*(f"joint{i}" for i in range(1, 8)), "finger1")
    assert arm.is_slide.tolist() == [False] * 7 + [True]
    joints = np.zeros(8)
    joints[7] = 0.03
    apart = arm.position(joints, arm.link("finger_link1")) - arm.position(joints, arm.link("finger_link2"))
    np.testing.assert_allclose(apart, [0.06, 0, 0], atol=1e-12)


LIMIT = '<limit lower="-2.0" upper="2.5" velocity="1.5" effort="40"/>'
XACRO = 'xmlns:xacro="http://www.ros.org/wiki/xacro"><xacro:include filename="y"/>'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</robot>", "", "is no XML"),
        ("robot", "house", "root element 'house'; allowed: robot"),
        ('name="planar">', XACRO, "xacro robot.urdf >"),
        (LIMIT, "", "shoulder is revolute and has no"),
        ('"shoulder" type="revolute"', '"shoulder" type="floating"', "shoulder is floating; allowed: fixed, rev"),
        ('lower="-2.0"', 'lower="two"', "lower: 'two' is no number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_joints(save(tmp_path, PLANAR.replace(old, new)))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.urdf cannot be read"):
        read_joints(tmp_path / "nowhere.urdf")


def with_meshes(address: str, other: str) -> str:
    """The planar arm with meshes for boxes, and pictures whose meshes do not exist."""
    visual = '<visual><geometry><mesh filename="package://nowhere/picture.dae"/></geometry></visual>'
    text = PLANAR.replace('<box size="0.4 0.04 0.04"/>', f'<mesh filename="{address}" scale="1 0.1 0.1"/>')
    text = text.replace('<box size="0.3 0.04 0.04"/>', f'<mesh filename="{other}"/>')
    return text.replace('<link name="upper">', f'<link name="upper">{visual}')


@pytest.mark.parametrize("address", ["../meshes/collision/link.stl", "package://my_arm/meshes/collision/link.stl"])
def test_meshes_are_found_beside_the_file_and_in_packages(tmp_path: Path, address: str) -> None:
    path = save(tmp_path, with_meshes(address, "../meshes/other/link.stl"), "my_arm/urdf/robot.urdf")
    box_stl(tmp_path / "my_arm/meshes/collision/link.stl", 0.4)
    box_stl(tmp_path / "my_arm/meshes/other/link.stl", 0.1)  # of the same name
    wall = Box(name="wall", center=(0.2, 0.5, 0), size=(1, 0.9, 1))  # its face is at y = 0.05
    arm = ArmModel(ModelConfig(file=str(path), boxes=(wall,)), path)
    distances = arm.distances(np.zeros(2))
    assert distances["upper", "wall"] == pytest.approx(0.03, abs=1e-6)
    assert ("lower", "wall") in distances and distances["lower", "wall"] == pytest.approx(0.0, abs=1e-6)


def test_packages_can_be_told_or_come_from_ros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, with_meshes("package://arm/a.stl", "package://arm/a.stl"), "here/robot.urdf")
    box_stl(tmp_path / "elsewhere/a.stl", 0.1)
    config = ModelConfig(file=str(path))
    with pytest.raises(ConfigError, match=r"package://arm/a.stl not found; .*model.packages: \{arm: FOLDER\}"):
        ArmModel(config, path)
    ArmModel(config.model_copy(update={"packages": {"arm": "../elsewhere"}}), path)
    box_stl(tmp_path / "ros/share/arm/a.stl", 0.1)
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path / "ros"))
    ArmModel(config, path)


def test_a_mesh_in_a_format_that_mujoco_does_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, with_meshes("a.dae", "a.dae"))
    (tmp_path / "a.dae").write_text("<COLLADA/>")
    with pytest.raises(ConfigError, match=r"a.dae: MuJoCo reads .stl, .obj, .msh; put the same mesh"):
        ArmModel(ModelConfig(file=str(path)), path)
    box_stl(tmp_path / "a.stl", 0.1)
    ArmModel(ModelConfig(file=str(path)), path)


MJCF = """<mujoco><compiler angle="radian"/><worldbody><geom name="floor" type="plane" size="1 1 1" pos="0 0 -0.1"/>
<body name="upper"><joint name="shoulder" axis="0 1 0" range="-2 2" actuatorfrcrange="-40 40"/>
 <geom type="capsule" fromto="0 0 0 0.4 0 0" size="0.02"/><geom type="box" size="1 1 1" contype="0" conaffinity="0"/>
 <body name="lower" pos="0.4 0 0"><joint name="elbow" axis="0 1 0" range="-1 1" ref="0.1"/>
  <geom size="0.02" pos="0.3 0 0"/>
  <body name="twin"><joint name="follower" axis="0 1 0"/><geom size="0.01" pos="0.5 0 0"/>
  </body></body></body></worldbody>
<equality><joint joint1="follower" joint2="elbow" polycoef="0 -2 0 0 0"/></equality>
<actuator><motor joint="elbow" gear="10" forcerange="-3 3" forcelimited="true"/></actuator></mujoco>"""


def test_an_mjcf_has_the_same_facts(tmp_path: Path) -> None:
    path = save(tmp_path, MJCF, "robot.xml")
    joints = read_joints(path)
    assert joints["shoulder"] == JointFacts(-2, 2, math.inf, 40)
    assert joints["elbow"] == JointFacts(-1, 1, math.inf, 30)
    mimic = joints["follower"].mimic
    assert mimic is not None and (mimic.joint, mimic.multiplier) == ("elbow", -2)
    assert mimic.offset == pytest.approx(0.2)  # the elbow counts from its `ref`
    arm = ArmModel(ModelConfig(file=str(path)), path)
    assert arm.joints == ("shoulder", "elbow")
    assert ("floor", "upper") not in arm.distances(np.array([0.0, 0.1]))  # 8 cm, and the picture's geom does not count
    assert arm.distances(np.array([0.1, 0.1]))["floor", "upper"] == pytest.approx(
        0.1 - 0.4 * math.sin(0.1) - 0.02, abs=1e-6
    )


def test_an_mjcf_with_a_loose_thing_is_refused(tmp_path: Path) -> None:
    text = MJCF.replace("</worldbody>", '<body><freejoint name="loose"/><geom size="0.1"/></body></worldbody>')
    with pytest.raises(ConfigError, match="joint loose: allowed: hinge and slide"):
        read_joints(save(tmp_path, text, "robot.xml"))
