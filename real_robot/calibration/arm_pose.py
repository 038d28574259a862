"""The gripper's pose out of what a contract reads: from a pose topic, or from joints through the robot's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from real_robot.calibration.transforms import pose_of
from real_robot.contract.channels import AlignConfig, ConversionConfig, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.transports.base import QosConfig
from vla_rl.config import ConfigError

POSE = "geometry_msgs/PoseStamped"


@dataclass(frozen=True)
class PoseReader:
    """A contract to listen by, without actions, and the gripper's pose (4, 4) of the state (S,) that it gives."""

    contract: RobotContract
    pose: Callable[[np.ndarray], np.ndarray]


def pose_reader(contract: RobotContract, camera: str, topic: str = "", link: str = "") -> PoseReader:
    """What to listen to for the gripper's pose, and for a camera in its own size.

    Args:
        camera: its name in the contract, or "" for none.
        topic: a PoseStamped of the gripper in the base's frame; empty: the contract's own, or `link`.
        link: the link of the robot's file (`model`) whose pose is computed from joints.

    Raises:
        ConfigError: no such camera, or nothing that gives a pose.
    """
    observation = contract.observation
    if camera and camera not in observation.images:
        raise ConfigError(f"--camera: got {camera!r}; {contract.name} has: {', '.join(observation.images)}")
    images = {camera: observation.images[camera].model_copy(update={"size": None})} if camera else {}
    if link:
        state, pose = observation.state, _from_joints(contract, link)
    else:
        source = _pose_source(contract, topic)
        state, pose = (source,), lambda values: pose_of(values[:3], values[3:7])
    changed = observation.model_copy(
        update={"images": images, "state": state, "reference": "", "instruction_topic": "", "max_age": 1.0}
    )
    return PoseReader(contract.model_copy(update={"observation": changed, "action": ()}), pose)


def _pose_source(contract: RobotContract, topic: str) -> StateSource:
    known = [s for s in contract.observation.state if s.type == POSE]
    if topic:
        known = [s for s in known if s.topic == topic] or [
            StateSource(
                topic=topic, type=POSE, qos=QosConfig(reliability="best_effort"), align=AlignConfig(tolerance=0.1)
            )
        ]
    if not known:
        raise ConfigError(
            f"{contract.name} reads no pose of the gripper: name its topic (--pose /tcp_pose), or give the contract a "
            "`model` (URDF) and name the gripper's link (--link tool0)"
        )
    # In the driver's meters, whatever the policy's units are.
    return known[0].model_copy(update={"parts": ("position", "quaternion"), "convert": ConversionConfig()})


def _from_joints(contract: RobotContract, link: str) -> Callable[[np.ndarray], np.ndarray]:
    if contract.model is None:
        raise ConfigError(f"--link: {contract.name} has no `model` (URDF or MJCF) to compute {link!r} with")
    from real_robot.contract.joint_mapping import measured_joints
    from real_robot.kinematics.arm_model import ArmModel

    arm = ArmModel(contract.model, Path(contract.model.file))
    number, measured = arm.link(link), measured_joints(contract, contract.model)
    if not measured:
        raise ConfigError(f"--link: none of {contract.name}'s state is a joint of {contract.model.file}")

    def pose(state: np.ndarray) -> np.ndarray:
        joints = arm.neutral.copy()
        for one in measured:
            joints[arm.index(one.joint)] = one.scale * float(state[one.number]) + one.offset
        made = np.eye(4)
        made[:3, :3], made[:3, 3] = arm.rotation(joints, number), arm.position(joints, number)
        return made

    return pose
