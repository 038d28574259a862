"""A toy environment for tests: move a white dot to a colored square. Numpy only, no physics, no renderer.

Kept very cheap, deterministic and learnable in seconds, with 7-D actions and an 8-D state like the
real simulators. It can break on purpose (`fault`), which the tests of the vector runner use.
"""

from __future__ import annotations

import math
import os
import signal
import time
import zlib
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from sim.base import ObjectPosesConfig
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

INSTRUCTIONS = {"reach_red": "move to the red square", "reach_blue": "move to the blue square"}
COLORS = {"reach_red": (220, 40, 40), "reach_blue": (40, 70, 220)}
STEP = 0.2  # distance moved by an action of 1; the workspace is [-1, 1] x [-1, 1]
RADIUS = 0.2  # closer than this to the square's center is a success
HALF_SQUARE, HALF_DOT = 0.2, 0.1
FINGER = 0.04  # meters, an open finger

Fault = Literal["none", "start", "die", "hang", "nan", "raise"]


class DummyConfig(ObjectPosesConfig):
    """A 2-D reach task for tests."""

    object_names: ClassVar[tuple[str, ...]] = ("red", "blue")
    kind: Literal["sim.dummy:DummyConfig"] = "sim.dummy:DummyConfig"
    image_size: PositiveInt = Field(default=32, description="Height and width of the images, pixels.")
    horizon: PositiveInt = Field(default=16, description="Control steps before truncation.")
    fault: Fault = Field(
        default="none",
        description="Break on purpose: start (cannot be made), die (kills its process), hang, nan (state), raise.",
    )
    fault_step: NonNegativeInt = Field(default=0, description="Control step of the episode at which it breaks.")
    fault_index: NonNegativeInt = Field(default=0, description="Only episodes with this index of initial state break.")

    def env_spec(self) -> EnvSpec:
        tasks = self.tasks or tuple(INSTRUCTIONS)
        return self._arm_spec(
            "dummy",
            {task: INSTRUCTIONS[task] for task in tasks},
            dict.fromkeys(tasks, self.horizon),
            control_hz=10.0,
        )

    def make(self, record_frames: bool = False) -> DummyEnv:
        if self.fault == "start":
            raise RuntimeError("DummyConfig.fault is 'start', so this environment cannot be made")
        return DummyEnv(self, record_frames)


class DummyEnv(SingleEnv):
    """One dot, two squares. Action (7,): dx, dy; the gripper (last) moves the fingers; the rest does nothing.

    Cameras: "wrist" is centered on the dot, any other name shows the whole workspace. State (8,):
    x, y of the dot, 0, three zeros for the rotation, and the two finger positions.
    """

    def __init__(self, config: DummyConfig, record_frames: bool = False) -> None:
        self.config = config
        self.spec = config.env_spec()
        self.record_frames = record_frames
        self._task = ""
        self._fault_here = False

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: a keyframe of another environment or task.
        """
        self._task = spec.task
        self._instruction = spec.instruction or self.spec.tasks[spec.task]
        self.horizon = self.spec.horizon[spec.task]
        self._fault_here = spec.index == self.config.fault_index
        if spec.keyframe is not None:
            self._restore(spec.keyframe)
            return self.observe()
        seed = (zlib.crc32(spec.task.encode()), SPLITS.index(spec.split), spec.index)
        rng = np.random.default_rng(seed)
        self._dot = rng.uniform(-0.9, 0.9, 2)
        self._squares = np.array([rng.uniform(-0.8, -0.2, 2), rng.uniform(0.2, 0.8, 2)])
        if rng.random() < 0.5:
            self._squares = self._squares[::-1].copy()
        self._finger = FINGER
        self.num_steps = 0
        return self.observe()

    def apply(self, action: np.ndarray) -> bool:
        """Move. Success is being within RADIUS of the square's center."""
        if self._fault_here and self.num_steps == self.config.fault_step:
            self._break()
        self._dot = np.clip(self._dot + STEP * action[:2].astype(np.float64), -1.0, 1.0)
        if action[6] != 0:
            self._finger = FINGER if action[6] < 0 else 0.0
        return bool(np.linalg.norm(self._dot - self._goal()) < RADIUS)

    def _break(self) -> None:
        match self.config.fault:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(1.0)
            case "nan":
                self._dot = np.full(2, np.nan)
            case "raise":
                raise RuntimeError("DummyConfig.fault is 'raise'")

    def _goal(self) -> np.ndarray:
        return self._squares[list(INSTRUCTIONS).index(self._task)]

    def observe(self) -> SingleObservation:
        images = {camera: self._draw(self._dot if camera == "wrist" else np.zeros(2)) for camera in self.spec.cameras}
        state = np.array([*self._dot, 0, 0, 0, 0, self._finger, -self._finger], np.float32)
        return SingleObservation(images, state, self._instruction)

    def object_poses(self) -> np.ndarray:
        """Of the two squares."""
        return np.pad(self._squares, ((0, 0), (0, 2))).astype(np.float32)

    def _draw(self, center: np.ndarray) -> np.ndarray:
        """The workspace around `center`, uint8 (size, size, 3); y points up."""
        size = self.config.image_size
        image = np.full((size, size, 3), 30, np.uint8)
        shapes = [*zip(self._squares, [HALF_SQUARE] * 2, COLORS.values(), strict=True)]
        for place, half, color in [*shapes, (self._dot, HALF_DOT, (250, 250, 250))]:
            x, y = (place - center).tolist()
            image[_pixels(-y, half, size), _pixels(x, half, size)] = color
        return image

    def expert_action(self) -> np.ndarray:
        """Straight to the square."""
        action = np.zeros(7, np.float32)
        action[:2] = np.clip((self._goal() - self._dot) / STEP, -1, 1)
        action[6] = -1
        return action

    def save_state(self) -> Keyframe:
        arrays = {"dot": self._dot.copy(), "squares": self._squares.copy(), "finger": np.array([self._finger])}
        return Keyframe("dummy", self._task, self.num_steps, arrays)

    def _restore(self, keyframe: Keyframe) -> None:
        if (keyframe.env, keyframe.task) != ("dummy", self._task):
            raise ValueError(
                f"this keyframe is of {keyframe.env}/{keyframe.task}, the episode asked for is of dummy/{self._task}"
            )
        self._dot, self._squares = keyframe.arrays["dot"].copy(), keyframe.arrays["squares"].copy()
        self._finger = float(keyframe.arrays["finger"][0])
        self.num_steps = keyframe.step

    def close(self) -> None:
        self._task = ""


def _pixels(place: float, half: float, size: int) -> slice:
    """The pixels from place - half to place + half of an axis that shows [-1, 1], at least one; none if NaN."""
    if math.isnan(place):
        return slice(0, 0)
    start, stop = (min(max((place + side + 1) / 2, 0.0), 1.0) * size for side in (-half, half))
    return slice(int(start), max(math.ceil(stop), int(start) + 1))
