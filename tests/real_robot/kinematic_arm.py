"""A robot and a leader arm registered with LeRobot, without hardware: joints that are where they were told, a camera.

Contracts name this module in `modules`. What they do wrong, they do on demand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")
HEIGHT, WIDTH = 48, 64


@RobotConfig.register_subclass("kinematic_arm")
@dataclass
class KinematicArmConfig(RobotConfig):
    port: str = ""
    start: list[float] = field(default_factory=lambda: [10.0, -20.0, 50.0])
    calibrated: bool = True


class Camera:
    """Takes frames by itself until told to `freeze`, as LeRobot's do."""

    def __init__(self) -> None:
        self.frozen: float | None = None

    @property
    def latest_timestamp(self) -> float:
        return time.perf_counter() if self.frozen is None else self.frozen


class KinematicArm(Robot):
    """`made`: all that were made, the newest last."""

    config_class = KinematicArmConfig
    name = "kinematic_arm"
    made: ClassVar[list[KinematicArm]] = []

    def __init__(self, config: KinematicArmConfig) -> None:
        super().__init__(config)
        self.config = config
        self.position = dict(zip(JOINTS, config.start, strict=True))
        self.sent: list[dict[str, float]] = []
        self.torque = False
        self.pictures = 0
        self.cameras = {"front": Camera()}
        self.answers = threading.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.threads: set[int] = set()
        KinematicArm.made.append(self)

    @property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, "front": (HEIGHT, WIDTH, 3), "front_depth": (HEIGHT, WIDTH, 1)}

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(JOINTS, float)

    @property
    def is_connected(self) -> bool:
        return self.torque

    def connect(self, calibrate: bool = True) -> None:
        if self.config.port == "missing":
            raise ConnectionError("Could not connect on port 'missing'.")
        assert not calibrate, "it would ask questions in the terminal"
        self.torque = True

    @property
    def is_calibrated(self) -> bool:
        return self.config.calibrated

    def calibrate(self) -> None:
        raise AssertionError("asks questions in the terminal")

    def configure(self) -> None: ...

    def _bus(self) -> None:
        self.threads.add(threading.get_ident())
        self.answers.wait()
        if self.error is not None:
            raise self.error

    def get_observation(self) -> dict[str, Any]:
        self._bus()
        picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        picture[..., 0] = 200
        self.pictures += 1
        picture[:, WIDTH // 2 :, 2] = self.pictures % 256  # no two pictures of a camera are the same
        return {**self.position, "front": picture, "front_depth": np.zeros((HEIGHT, WIDTH, 1), np.uint16)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self._bus()
        assert set(action) == set(JOINTS)
        self.sent.append(dict(action))
        self.position.update(action)
        return action

    def disconnect(self) -> None:
        self._bus()
        self.torque = False


@TeleoperatorConfig.register_subclass("kinematic_leader")
@dataclass
class KinematicLeaderConfig(TeleoperatorConfig):
    start: list[float] = field(default_factory=lambda: [10.0, -20.0, 50.0])


class KinematicLeader(Teleoperator):
    """`position`: where the person's hand holds it."""

    config_class = KinematicLeaderConfig
    name = "kinematic_leader"
    made: ClassVar[list[KinematicLeader]] = []

    def __init__(self, config: KinematicLeaderConfig) -> None:
        super().__init__(config)
        self.position = dict(zip(JOINTS, config.start, strict=True))
        self.connected = False
        self.error: Exception | None = None
        KinematicLeader.made.append(self)

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(JOINTS, float)

    @property
    def feedback_features(self) -> dict[str, Any]:
        return {}

    @property
    def is_connected(self) -> bool:
        return self.connected

    def connect(self, calibrate: bool = True) -> None:
        self.connected = True

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_action(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return dict(self.position)

    def send_feedback(self, feedback: dict[str, Any]) -> None: ...

    def disconnect(self) -> None:
        self.connected = False
