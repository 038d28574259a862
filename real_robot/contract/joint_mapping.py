"""Joint mapping: which joint of the robot's file each number of an action, or of the state, is, and in which unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from real_robot.contract.contract import RobotContract
from real_robot.contract.model import JointName, ModelConfig
from vla_rl.config import ConfigError

POSE = "geometry_msgs/PoseStamped"


@dataclass(frozen=True)
class Scaled:
    """One number of an action or state, and the joint that it is: position = scale * number + offset.

    `sign` of a velocity's scale is kept, its offset has no meaning.
    """

    number: int
    joint: str
    scale: float
    offset: float

    def number_of(self, position: float) -> float:
        """The number that puts the joint there."""
        return (position - self.offset) / self.scale


def commanded_joints(contract: RobotContract, model: ModelConfig) -> list[Scaled]:
    """Which numbers of the action are joints.

    Raises:
        ConfigError: model.commands names a number that the action lacks, one joint is commanded twice, or a pose is
            commanded: no model can tell which of the joints' ways there the robot takes.
    """
    found: list[Scaled] = []
    if poses := [sink.topic for sink in contract.action if sink.type == POSE]:
        raise ConfigError(
            f"model: {poses[0]} takes poses ({POSE}), which cannot be checked against the robot's model: which joints "
            "get it there is the robot's choice; command joints or twists, or leave `model` out"
        )
    for sink in contract.action:
        for place, number in enumerate(sink.indices):
            scale, offset = sink.convert.of(place)
            link = model.commands.get(number)
            if link is None and place < len(sink.joints):
                link = model.joint_of(sink.joints[place])
            if link is not None:
                found.append(Scaled(number, link.joint, link.scale * scale, link.scale * offset + link.offset))
    _check("model.commands", found, model.commands, contract.action_dim)
    return found


def measured_joints(contract: RobotContract, model: ModelConfig) -> list[Scaled]:
    """Which numbers of the observed state are joints' positions.

    Raises:
        ConfigError: model.states names a number that the state lacks, or one joint is measured twice.
    """
    found: list[Scaled] = []
    number = 0
    for source in contract.observation.state:
        for place in range(source.num_values):
            scale, offset = source.convert.of(place)
            link = model.states.get(number)
            if link is None and source.joints:
                link = model.joint_of(source.joints[place])
            if link is not None and scale != 0:
                found.append(Scaled(number, link.joint, link.scale / scale, link.offset - link.scale * offset / scale))
            number += 1
    _check("model.states", found, model.states, number)
    return found


def _check(section: str, found: list[Scaled], told: dict[int, JointName], size: int) -> None:
    if wrong := [number for number in told if not 0 <= number < size]:
        raise ConfigError(f"{section}: {wrong[0]}: the contract has the numbers 0 to {size - 1}")
    joints = [link.joint for link in found]
    if twice := [joint for joint in joints if joints.count(joint) > 1]:
        raise ConfigError(f"{section}: joint {twice[0]} stands for two numbers")
    if flat := [link.joint for link in found if link.scale == 0 or not np.isfinite(link.scale)]:
        raise ConfigError(f"{section}: joint {flat[0]}: convert.scale must not be 0")
