"""Perturbations of episodes: one axis at one level, drawn from the episode's seed alone.

The axes are those of LIBERO-Plus (arXiv 2510.13626) and LIBERO-PRO (arXiv 2510.03827). An episode's perturbation
follows from axis, task, split and index, the same direction at every level, so that levels differ in strength alone and
a perturbed episode pairs with the clean one of the same initial state. What the robot is told is the clean
instruction, but for the axis `wording`, which says the same in other words.
"""

from __future__ import annotations

import colorsys
import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy  # Its `spatial` comes with the first use.
from pydantic import Field

from sim.single_env import SingleObservation
from vla_rl.config import Config, validate
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.types import EpisodeSpec

Axis = Literal["camera", "light", "texture", "distractors", "layout", "robot", "noise", "wording"]
LEVELS = (1, 2, 3)

# By level, from 0 (nothing).
ORBIT = (0.0, 5.0, 12.0, 22.0)  # degrees that a standing camera goes around what it looks at
RISE = (0.0, 3.0, 6.0, 10.0)  # degrees, up or down
ROLL = (0.0, 1.0, 3.0, 5.0)  # degrees about its own axis
ZOOM = (0.0, 0.03, 0.08, 0.12)  # share of its distance, nearer or further
BRIGHTER, DIMMER = (1.0, 1.25, 1.55, 1.9), (1.0, 0.8, 0.6, 0.42)
TINT = (0.0, 0.1, 0.25, 0.4)  # share by which each of the light's colors differs
TILT = (0.0, 0.3, 0.7, 1.2)  # of a light's direction, in units of its length
REPAINT = (0.0, 0.2, 0.5, 1.0)  # how far surfaces go to another color
PIXEL_NOISE = (0.0, 10.0, 25.0, 45.0)  # standard deviation, of 255
POSITION_NOISE = (0.0, 0.001, 0.003, 0.006)  # meters, of the hand's measured position
ANGLE_NOISE = (0.0, 0.005, 0.015, 0.03)  # radians


class PerturbConfig(Config):
    """What is different in every episode."""

    axis: Axis = Field(
        description="camera, light, texture, distractors, layout (of the objects), robot (its initial pose), noise (of "
        "its senses) or wording."
    )
    level: Literal[1, 2, 3] = Field(default=2, description="1 is slight, 2 clear, 3 hard.")

    @staticmethod
    def named(name: str) -> PerturbConfig | None:
        """The perturbation that `EpisodeSpec.perturbation` names; None for "clean".

        Raises:
            ConfigError: no such axis or level.
        """
        if name == "clean":
            return None
        axis, _, level = name.rpartition("-")
        return validate(PerturbConfig, {"axis": axis, "level": int(level) if level.isdecimal() else level}, name)


@dataclass(frozen=True)
class Surfaces:
    """What the axis `texture` repaints: geoms, and the materials that they may have in place of their own."""

    geoms: Sequence[int]
    materials: Sequence[int] = ()


class Perturbation:
    """The perturbation of one episode: what its spec names, else the environment's; without either, none.

    Attributes:
        name: "camera-2"; empty: none.
    """

    def __init__(self, config: PerturbConfig | None, spec: EpisodeSpec) -> None:
        config = PerturbConfig.named(spec.perturbation) if spec.perturbation else config
        self._config = config
        self.name = f"{config.axis}-{config.level}" if config else ""
        named = f"{config.axis if config else ''}/{spec.task}/{spec.split}/{spec.index}"
        self._seed = zlib.crc32(named.encode())

    def level(self, axis: Axis) -> int:
        """The level at which this axis is perturbed, 0 for not at all."""
        return self._config.level if self._config is not None and self._config.axis == axis else 0

    def rng(self) -> np.random.Generator:
        """A fresh generator of the episode's own."""
        return np.random.default_rng(self._seed)

    @contextlib.contextmanager
    def look(self, model: Any, cameras: Sequence[int], target: np.ndarray, surfaces: Surfaces) -> Iterator[None]:
        """Within, a MuJoCo model looks perturbed; afterwards as before.

        Args:
            cameras: those that stand still. target (3,): about what they look at, meters.
        """
        headlight = model.vis.headlight
        changed = {
            "camera": (model.cam_pos, model.cam_quat),
            "light": (model.light_dir, model.light_diffuse, model.light_ambient, headlight.ambient, headlight.diffuse),
            "texture": (model.geom_rgba, model.geom_matid),
        }.get(self._config.axis if self._config else "", ())
        before = [array.copy() for array in changed]
        try:
            if self.level("camera"):
                for camera in cameras:
                    self._move_camera(model, camera, target)
            elif self.level("light"):
                self._relight(*changed)
            elif self.level("texture"):
                self._repaint(model, surfaces)
            yield
        finally:
            for array, values in zip(changed, before, strict=True):
                array[:] = values

    def _move_camera(self, model: Any, camera: int, target: np.ndarray) -> None:
        level, rng = self.level("camera"), self.rng()
        rotation = scipy.spatial.transform.Rotation
        orbit, rise, roll = (np.radians(table[level]) * _either_way(rng) for table in (ORBIT, RISE, ROLL))
        pose, position = rotation.from_quat(np.roll(model.cam_quat[camera], -1)), model.cam_pos[camera].copy()
        right, _, back = pose.as_matrix().T
        center = position - back * ((position - target) @ back)
        turn = rotation.from_rotvec([0, 0, orbit]) * rotation.from_rotvec(rise * right)
        away = turn.apply(position - center) * (1 + ZOOM[level] * _either_way(rng))
        model.cam_pos[camera] = center + away
        model.cam_quat[camera] = np.roll((turn * pose * rotation.from_rotvec([0, 0, roll])).as_quat(), 1)

    def _relight(self, direction: Any, diffuse: Any, ambient: Any, head_ambient: Any, head_diffuse: Any) -> None:
        level, rng = self.level("light"), self.rng()
        factor = (BRIGHTER if rng.uniform() < 0.5 else DIMMER)[level] * (1 + TINT[level] * rng.uniform(-1, 1, 3))
        for color in (diffuse, ambient, head_ambient, head_diffuse):
            color[:] = np.clip(color * factor, 0, 1)
        direction[:, :2] += TILT[level] * rng.uniform(-1, 1, (len(direction), 2))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)

    def _repaint(self, model: Any, surfaces: Surfaces) -> None:
        level, rng = self.level("texture"), self.rng()
        color = np.array(colorsys.hsv_to_rgb(rng.uniform(), rng.uniform(0.4, 0.8), rng.uniform(0.35, 0.75)))
        material = int(rng.choice(surfaces.materials)) if len(surfaces.materials) else -1
        for geom in surfaces.geoms:
            own = model.geom_matid[geom]
            # A geom whose color is MuJoCo's default shows that of its material.
            shown = model.mat_rgba[own] if own >= 0 and (model.geom_rgba[geom] == [0.5, 0.5, 0.5, 1]).all() else None
            old = (model.geom_rgba[geom] if shown is None else shown)[:3]
            model.geom_rgba[geom, :3] = (1 - REPAINT[level]) * old + REPAINT[level] * color
            if level > 1 and material >= 0:
                model.geom_matid[geom] = material

    def seen(self, obs: SingleObservation, step: int) -> SingleObservation:
        """What the robot's senses give of an observation, after `step` control steps: with noise, on that axis."""
        if not (level := self.level("noise")):
            return obs
        rng = np.random.default_rng([self._seed, step])
        images = {
            name: image if name.startswith(CAMERA_PREFIX) else _noisy(image, PIXEL_NOISE[level], rng)
            for name, image in obs.images.items()
        }
        spread = np.repeat([POSITION_NOISE[level], ANGLE_NOISE[level], 0.0], (3, 3, len(obs.state) - 6))
        return SingleObservation(images, (obs.state + rng.normal(0, spread)).astype(np.float32), obs.instruction)

    def rephrased(self, instruction: str, paraphrases: Sequence[str]) -> str:
        """The instruction; on the axis `wording` the level's one of its three paraphrases."""
        return (instruction, *paraphrases)[self.level("wording")]


def _either_way(rng: np.random.Generator) -> float:
    """From 0.7 to 1, or from -1 to -0.7."""
    return float(rng.uniform(0.7, 1.0) * rng.choice([-1.0, 1.0]))


def _noisy(image: np.ndarray, spread: float, rng: np.random.Generator) -> np.ndarray:
    return np.clip(image + rng.normal(0, spread, image.shape), 0, 255).astype(np.uint8)
