"""Robots as URDFs, written by the tests: a planar arm of two links, and one of seven joints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PLANAR = """<robot name="planar">
  <link name="base"/>
  <link name="upper"><collision><origin xyz="0.2 0 0"/>
    <geometry><box size="0.4 0.04 0.04"/></geometry></collision></link>
  <link name="lower"><collision><origin xyz="0.15 0 0"/>
    <geometry><box size="0.3 0.04 0.04"/></geometry></collision></link>
  <link name="tip"/>
  <joint name="shoulder" type="revolute"><parent link="base"/><child link="upper"/><axis xyz="0 0 1"/>
    <limit lower="-2.0" upper="2.5" velocity="1.5" effort="40"/></joint>
  <joint name="elbow" type="revolute"><parent link="upper"/><child link="lower"/><origin xyz="0.4 0 0"/>
    <axis xyz="0 0 1"/>
    <limit lower="-2.8" upper="2.8" velocity="2.0" effort="20"/></joint>
  <joint name="tool" type="fixed"><parent link="lower"/><child link="tip"/><origin xyz="0.3 0 0"/></joint>
</robot>
"""


def seven_joints(extra: str = "") -> str:
    """An arm like those that labs have."""
    return chain([f"joint{i}" for i in range(1, 8)], extra)


def chain(joints: list[str], extra: str = "") -> str:
    """An arm of these joints, turning about z and y in turn, links of 0.16 m, cylinders, and a hand."""
    parts = [
        '<robot name="chain">',
        '<link name="link0"><collision><geometry><box size="0.2 0.2 0.1"/></geometry></collision></link>',
    ]
    for i, joint in enumerate(joints, 1):
        axis = "0 0 1" if i % 2 else "0 1 0"
        parts.append(
            f'<link name="link{i}"><collision><origin xyz="0 0 0.08"/><geometry><cylinder radius="0.04" length="0.14"/>'
            f'</geometry></collision></link><joint name="{joint}" type="revolute"><parent link="link{i - 1}"/>'
            f'<child link="link{i}"/><origin xyz="0 0 0.16"/><axis xyz="{axis}"/>'
            f'<limit lower="-2.6" upper="2.6" velocity="2.0" effort="80"/></joint>'
        )
    parts.append(
        f'<link name="hand"/><joint name="hand_joint" type="fixed"><parent link="link{len(joints)}"/>'
        '<child link="hand"/><origin xyz="0 0 0.16"/></joint>'
    )
    return "".join((*parts, extra, "</robot>"))


def joint_contract(folder: Path, urdf: str, joints: list[str], **sections: Any) -> Path:
    """A contract, and its robot.urdf beside it, that commands and measures these joints as positions, over ROS 1."""
    (folder / "robot.urdf").write_text(urdf)
    dimensions = [
        {"name": j, "kind": "position", "state": i, "low": -3, "high": 3, "max_velocity": 1.0, "max_acceleration": 8.0}
        for i, j in enumerate(joints)
    ]
    values: dict[str, Any] = {
        "name": "arm",
        "rate": 50,
        "observation": {"state": [{"topic": "/joint_states", "type": "sensor_msgs/JointState", "joints": joints}]},
        "action": [
            {
                "topic": "/command",
                "type": "trajectory_msgs/JointTrajectory",
                "joints": joints,
                "indices": list(range(len(joints))),
            }
        ],
        "safety": {"dimensions": dimensions},
        "execution": {"kind": "position"},
        "model": {"file": "robot.urdf"},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) and name in values else section
    path = folder / "robot.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
