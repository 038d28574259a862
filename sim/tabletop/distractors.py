"""Visual distractors on the tabletop, without physics."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from sim.tabletop.tasks import Layout

NUMBER = (0, 2, 4, 7)  # by level of `sim.perturb`
AREA = (-0.20, 0.19, -0.21, 0.21)  # x low, x high, y low, y high of where they stand, meters
CLEAR = 0.095  # of the task's objects' centers, meters
CLEAR_OF_PATH = 0.065  # of the straight ways from the gripper to each object and between these, meters
APART = 0.07  # of one another, meters
TRIES = 400  # of placing one; where nothing is free any more there are fewer
COLORS = ((0.95, 0.45, 0.65), (0.45, 0.28, 0.12), (0.05, 0.45, 0.45), (0.75, 0.75, 0.55), (0.28, 0.36, 0.22))
# Shape, half sizes in meters as MuJoCo takes them, height of the center.
SHAPES = (
    (mujoco.mjtGeom.mjGEOM_CYLINDER, (0.022, 0.022, 0.035), 0.035),
    (mujoco.mjtGeom.mjGEOM_BOX, (0.018, 0.034, 0.012), 0.012),
    (mujoco.mjtGeom.mjGEOM_SPHERE, (0.024, 0.024, 0.024), 0.024),
    (mujoco.mjtGeom.mjGEOM_CYLINDER, (0.030, 0.030, 0.008), 0.008),
    (mujoco.mjtGeom.mjGEOM_BOX, (0.022, 0.022, 0.022), 0.022),
)


@dataclass(frozen=True)
class Distractor:
    """A thing that is only drawn: an index into `SHAPES`, one into `COLORS`, where it stands, and its turn."""

    shape: int
    color: int
    place: tuple[float, float]
    yaw: float

    def add_to(self, scene: mujoco.MjvScene) -> None:
        """Have it drawn with the scene."""
        kind, size, height = SHAPES[self.shape]
        cos, sin = math.cos(self.yaw), math.sin(self.yaw)
        turn = np.array([cos, -sin, 0, sin, cos, 0, 0, 0, 1], np.float64)
        color = np.array([*COLORS[self.color], 1], np.float32)
        mujoco.mjv_initGeom(
            scene.geoms[scene.ngeom], kind, np.array(size, np.float64), np.array([*self.place, height]), turn, color
        )
        scene.ngeom += 1


def draw_distractors(layout: Layout, level: int, rng: np.random.Generator) -> list[Distractor]:
    """Those of an episode at this level; those of a lower level are the first of them."""
    things = [np.array(place[:2]) for place in layout.places.values()]
    stops = [np.array(layout.gripper[:2]), *things]
    ways = [(a, b) for i, a in enumerate(stops) for b in stops[:i]]
    x0, x1, y0, y1 = AREA
    placed: list[Distractor] = []
    for _ in range(TRIES):
        if len(placed) == NUMBER[level]:
            break
        at = np.array([rng.uniform(x0, x1), rng.uniform(y0, y1)])
        drawn = Distractor(
            int(rng.integers(len(SHAPES))), int(rng.integers(len(COLORS))), (at[0], at[1]), rng.uniform(0, math.pi)
        )
        if (
            all(math.dist(at, thing) >= CLEAR for thing in things)
            and all(math.dist(at, other.place) >= APART for other in placed)
            and all(_distance(at, way) >= CLEAR_OF_PATH for way in ways)
        ):
            placed.append(drawn)
    return placed


def _distance(point: np.ndarray, way: Sequence[np.ndarray]) -> float:
    """Of a point from the straight line between two others, meters."""
    start, end = way
    along = end - start
    share = np.clip((point - start) @ along / max(along @ along, 1e-12), 0, 1)
    return float(np.linalg.norm(point - start - share * along))
