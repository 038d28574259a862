"""Where a LIBERO scene has room for something more: in nobody's way, and hiding nothing that the task is about."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from sim.libero.suites import CAMERAS

if TYPE_CHECKING:
    from sim.libero.scene import Scene

HALF_AREA = np.array([0.38, 0.42])  # meters along x and y from the middle of the robot's place
CLEAR = 0.03  # meters from everything solid, seen from above
CLEAR_OF_TASK = 0.06  # from what the task is about: room for the fingers
CLEAR_OF_SWEEP = 0.06  # from where doors and drawers go
CLEAR_OF_WAY = 0.05  # from the straight ways of the hand to and between what the task is about
HEADROOM = 0.30  # meters over the surface; what is higher up is in nobody's way
LEVEL = 0.003  # meters by which a surface's height may differ
IN_VIEW = (0.05, 0.95)  # of the image, where a thing's middle is seen
SWEEP = np.linspace(0, 1, 6)  # shares of a joint's range
_FAR = 5.0  # meters, above, from where the surface is felt for


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


class Surroundings:
    """What stands in a scene now, as points seen from above. `take` asks for room, and takes it.

    Attributes:
        surface: height of the table or floor, meters.
    """

    def __init__(self, scene: Scene, hidden: np.ndarray) -> None:
        """Args: hidden (n,), bodies that count for nothing."""
        self._model, self._middle = scene.model, scene.middle
        self._data = data = mujoco.MjData(scene.model)
        data.qpos[:] = scene.data.qpos
        mujoco.mj_kinematics(scene.model, data)
        mujoco.mj_camlight(scene.model, data)
        self._roots = scene.model.body_rootid[scene.model.geom_bodyid]
        self._ground = self._ground_geoms(scene, hidden)
        self.surface = self._height()
        solid = (scene.model.geom_contype != 0) | (scene.model.geom_conaffinity != 0)
        solid &= ~self._ground & ~np.isin(self._roots, hidden)
        self._things = [self._points_of(scene, name, solid) for name in task_names(scene)]
        near = [(points, CLEAR_OF_TASK) for points in self._things]
        near.append((self._low(self._points(np.flatnonzero(solid))), CLEAR))
        near.append((self._swept(scene, solid), CLEAR_OF_SWEEP))
        self._near = [(_from_above(points), clear) for points, clear in near if len(points)]
        stops = [data.site_xpos[scene.control.site][:2], *(points[:, :2].mean(0) for points in self._things)]
        self._ways = np.array(list(itertools.combinations(stops, 2)))
        self._boxes = [self._seen(points) for points in self._things]

    # ------------------------------------------------------------------ what is there

    def _ground_geoms(self, scene: Scene, hidden: np.ndarray) -> np.ndarray:
        """bool (ngeom,): of tables, floor and walls, which are no object, no fixture, no robot."""
        things = [*scene.env.objects_dict.values(), *scene.env.fixtures_dict.values()]
        roots = [self._model.body_rootid[self._model.body(thing.root_body).id] for thing in things]
        robot = self._model.body_rootid[self._model.body("robot0_base").id]
        return ~np.isin(self._roots, [*roots, robot, *hidden])

    def _points(self, geoms: np.ndarray) -> np.ndarray:
        return Shape(self._model, geoms.tolist()).points(self._data, 5) if len(geoms) else np.zeros((0, 3))

    def _low(self, points: np.ndarray) -> np.ndarray:
        return points[points[:, 2] < self.surface + HEADROOM]

    def _points_of(self, scene: Scene, name: str, solid: np.ndarray) -> np.ndarray:
        """Of an object or fixture its solid parts, of a region its box's."""
        if name in scene.env.object_sites_dict:
            site = self._model.site(name).id
            grid = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=3))) * self._model.site_size[site]
            return grid @ self._data.site_xmat[site].reshape(3, 3).T + self._data.site_xpos[site]
        thing = scene.env.get_object(name)
        body = self._model.body_rootid[self._model.body(thing.root_body).id]
        return self._points(np.flatnonzero(solid & (self._roots == body)))

    def _swept(self, scene: Scene, solid: np.ndarray) -> np.ndarray:
        """Of every fixture's doors and drawers, wherever they can be."""
        model, data = self._model, self._data
        fixtures = [model.body(thing.root_body).id for thing in scene.env.fixtures_dict.values()]
        moving = np.isin(model.body_rootid[model.jnt_bodyid], fixtures) & (model.jnt_limited != 0)
        geoms = np.flatnonzero(solid & np.isin(model.geom_bodyid, model.jnt_bodyid[moving]))
        address, ends, before = model.jnt_qposadr[moving], model.jnt_range[moving], data.qpos.copy()
        found = [np.zeros((0, 3))]
        for share in SWEEP if len(geoms) else ():
            data.qpos[address] = ends[:, 0] + share * (ends[:, 1] - ends[:, 0])
            mujoco.mj_kinematics(model, data)
            found.append(self._points(geoms))
        data.qpos[:] = before
        mujoco.mj_kinematics(model, data)
        return self._low(np.concatenate(found))

    def _height(self) -> float:
        """Of most of what is flat around the middle."""
        offsets = itertools.product(np.linspace(-1, 1, 9), repeat=2)
        heights = [self._ground_below(self._middle[:2] + HALF_AREA * np.array(at)) for at in offsets]
        known = np.round([height for height in heights if height is not None], 3)
        values, counts = np.unique(known, return_counts=True)
        return float(values[counts.argmax()]) if len(values) else 0.0

    def _ground_below(self, at: np.ndarray) -> float | None:
        """The ground's height at (x, y); None where something stands."""
        geom = np.zeros(1, np.int32)
        origin = np.array([*at, _FAR])
        distance = mujoco.mj_ray(self._model, self._data, origin, np.array([0.0, 0, -1]), None, 1, -1, geom)
        return None if geom[0] < 0 or not self._ground[geom[0]] else _FAR - distance

    # ------------------------------------------------------------------ room

    def anywhere(self, draws: np.random.Generator) -> np.ndarray:
        """A place (2,) around the middle."""
        return self._middle[:2] + HALF_AREA * draws.uniform(-1, 1, 2)

    def take(self, points: np.ndarray) -> bool:
        """Whether there is room for a thing with these points (n, 3); from then on it is part of what is there."""
        center = (points.min(0) + points.max(0))[:2] / 2
        radius = float(np.linalg.norm(points[:, :2] - center, axis=1).max())
        for others, clear in self._near:
            if np.linalg.norm(others - center, axis=1).min() < radius + clear:
                return False
        if len(self._ways) and _distances(center, self._ways).min() < radius + CLEAR_OF_WAY:
            return False
        if not self._is_seen(points) or not self._stands(center, radius):
            return False
        self._near.append((_from_above(points), CLEAR))
        return True

    def _is_seen(self, points: np.ndarray) -> bool:
        """Whether its middle is in the picture, and it is before nothing that the task is about."""
        low, high, depth = self._seen(points)
        middle = (low + high) / 2
        if (middle < IN_VIEW[0]).any() or (middle > IN_VIEW[1]).any():
            return False
        return not any(
            depth < their_depth and (low < their_high).all() and (high > their_low).all()
            for their_low, their_high, their_depth in self._boxes
        )

    def _seen(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Of points (n, 3), low and high corner (2,) in agentview, from 0 to 1, and the middle's depth in meters."""
        camera = self._model.camera(CAMERAS["agentview"]).id
        local = (points - self._data.cam_xpos[camera]) @ self._data.cam_xmat[camera].reshape(3, 3)
        depth = np.maximum(-local[:, 2], 1e-3)
        half = np.tan(np.radians(self._model.cam_fovy[camera]) / 2)
        at = 0.5 + 0.5 * local[:, :2] / depth[:, None] / half
        return at.min(0), at.max(0), float(depth.mean())

    def _stands(self, center: np.ndarray, radius: float) -> bool:
        """Whether the surface is flat and free under all of it."""
        angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
        rim = center + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        heights = [self._ground_below(at) for at in (center, *rim)]
        return all(height is not None and abs(height - self.surface) < LEVEL for height in heights)


def task_names(scene: Scene) -> list[str]:
    """What a task's goal or LIBERO's list of what matters names: objects, fixtures and regions."""
    problem = scene.env.parsed_problem
    named = [name for predicate in problem["goal_state"] for name in predicate[1:]] + list(problem["obj_of_interest"])
    known = {*scene.env.objects_dict, *scene.env.fixtures_dict, *scene.env.object_sites_dict}
    return [name for name in dict.fromkeys(named) if name in known]


def _from_above(points: np.ndarray) -> np.ndarray:
    """Points (n, 3) as a few (m, 2), to the centimeter."""
    return np.unique(np.round(points[:, :2], 2), axis=0)


def _distances(point: np.ndarray, ways: np.ndarray) -> np.ndarray:
    """Of a point (2,) from straight lines (n, 2, 2), meters."""
    start, along = ways[:, 0], ways[:, 1] - ways[:, 0]
    share = np.clip(((point - start) * along).sum(1) / np.maximum((along**2).sum(1), 1e-12), 0, 1)
    return np.linalg.norm(point - start - share[:, None] * along, axis=1)
