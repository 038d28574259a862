"""Where things are, for the scripted experts: collision boxes of LIBERO's objects as points in the world."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import mujoco
import numpy as np


@functools.cache
def _grid(per_edge: int) -> np.ndarray:
    return np.array(list(itertools.product(np.linspace(-1.0, 1.0, per_edge), repeat=3)))


class Shape:
    """Some geoms, an object's for one: an array of boxes (their oriented bounding boxes). Geoms by name or number."""

    def __init__(self, model: mujoco.MjModel, geoms: Sequence[str | int]) -> None:
        self.geoms = np.array([model.geom(geom).id for geom in geoms])
        bounds = model.geom_aabb[self.geoms]
        self._center, self._half = bounds[:, None, :3], bounds[:, None, 3:]

    def points(self, data: mujoco.MjData, per_edge: int = 2) -> np.ndarray:
        """A grid of points in each box, in the world, (n, 3), with `per_edge` points an edge; 2 are its corners."""
        local = self._center + self._half * _grid(per_edge)
        rotation = data.geom_xmat[self.geoms].reshape(-1, 3, 3)
        world = np.einsum("gij,gpj->gpi", rotation, local) + data.geom_xpos[self.geoms][:, None]
        return world.reshape(-1, 3)


def highest_near_path(points: np.ndarray, start: np.ndarray, end: np.ndarray, radius: float) -> float:
    """Height of the highest of `points` (n, 3) within `radius` of the segment start-end in the plane; -inf if none."""
    direction = end[:2] - start[:2]
    length = max(float(direction @ direction), 1e-12)
    along = np.clip((points[:, :2] - start[:2]) @ direction / length, 0.0, 1.0)
    distance = np.linalg.norm(points[:, :2] - (start[:2] + along[:, None] * direction), axis=1)
    near = points[distance < radius]
    return float(near[:, 2].max()) if len(near) else -np.inf
