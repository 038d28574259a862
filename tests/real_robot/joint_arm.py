"""An arm of any joints and cameras, registered with LeRobot: it is where it was told to be, and writes that down."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig

SIZE = 48


@RobotConfig.register_subclass("joint_arm")
@dataclass
class JointArmConfig(RobotConfig):
    joints: list[str] = field(default_factory=list)
    views: list[str] = field(default_factory=list)
    trace: str = ""


class JointArm(Robot):
    """Its cameras show a bar at 0 and where its first joint is."""

    config_class = JointArmConfig
    name = "joint_arm"

    def __init__(self, config: JointArmConfig) -> None:
        super().__init__(config)
        self.config, self.pictures, self.connected = config, 0, False
        self.position = dict.fromkeys(config.joints, 0.0)

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, **dict.fromkeys(self.config.views, (SIZE, SIZE, 3))}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self.config.joints, float)

    @property
    def is_connected(self) -> bool:
        return self.connected

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        image = np.full((SIZE, SIZE, 3), 60, np.uint8)
        image[:24, 20:26] = (230, 200, 40)
        self.pictures += 1
        image[-8:, :, 2] = self.pictures % 256  # No two pictures of a camera are the same.
        return {**self.position, **{view: image for view in self.config.views}}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.position.update(action)
        with Path(self.config.trace).open("a") as file:
            file.write(json.dumps(action) + "\n")
        return action

    def disconnect(self) -> None:
        self.connected = False
