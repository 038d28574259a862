"""Names of Trossen's two-arm robot for LeRobot, as its plugin of June 2026 has them, and nothing else of it.

(TrossenRobotics/lerobot_trossen: config_bi_widowxai_follower.py, widowxai_follower.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kinematic_arm import KinematicArm
from lerobot.cameras import CameraConfig
from lerobot.robots import RobotConfig

JOINTS = ("joint_0", "joint_1", "joint_2", "joint_3", "joint_4", "joint_5", "left_carriage_joint")


@RobotConfig.register_subclass("bi_widowxai_follower_robot")
@dataclass
class BiWidowXStandInConfig(RobotConfig):
    left_arm_ip_address: str
    right_arm_ip_address: str
    left_arm_max_relative_target: float | None = None
    right_arm_max_relative_target: float | None = None
    min_time_to_move_multiplier: float = 3.0
    loop_rate: int = 30
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    start: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


class BiWidowXStandIn(KinematicArm):
    config_class = BiWidowXStandInConfig
    name = "bi_widowxai_follower_robot"

    @property
    def action_features(self) -> dict[str, Any]:
        return {f"{side}_{joint}.pos": float for side in ("left", "right") for joint in JOINTS}

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, **{name: (480, 640, 3) for name in self.config.cameras}}
