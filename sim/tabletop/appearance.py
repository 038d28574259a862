"""Appearance of a tabletop episode, and its pictures: colors, table pattern, light, camera, distractors; rendering."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import colorsys
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import mujoco
import numpy as np

from sim.rendering import gl
from sim.rendering.gl import draw_structure
from sim.tabletop import scene as sc
from sim.tabletop.tasks import Layout

_CAMERA = "agentview"
MOST_HUE = 0.03  # Largest hue shift of an object, fraction of the color circle: it keeps its name.
# Of distractors:
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
class Look:
    """Appearance: the part of a model that only cameras see.

    Attributes:
        rgba: float32 (ngeom, 4). material: int32 (1,), the table's.
        light_dir: float64 (3,). light_diffuse, light_ambient: float32 (3,).
        camera_pos: float64 (3,), agentview's.
    """

    rgba: np.ndarray
    material: np.ndarray
    light_dir: np.ndarray
    light_diffuse: np.ndarray
    light_ambient: np.ndarray
    camera_pos: np.ndarray

    def write(self, model: mujoco.MjModel) -> None:
        """Make `model` look like this; nothing that physics reads is touched."""
        model.geom_rgba[:] = self.rgba
        model.geom_matid[model.geom("table").id] = self.material[0]
        model.light_dir[0] = self.light_dir
        model.light_diffuse[0] = self.light_diffuse
        model.vis.headlight.ambient[:] = self.light_ambient
        model.cam_pos[model.camera(_CAMERA).id] = self.camera_pos

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {f"look_{f.name}": getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_arrays(arrays: dict[str, np.ndarray]) -> Look:
        return Look(**{f.name: np.array(arrays[f"look_{f.name}"]) for f in fields(Look)})


def plain_look(task: str, colors: dict[str, str]) -> Look:
    """The look without variation: blocks in the named colors, everything else as modeled."""
    model, fresh = sc.load_scene(task).model, _as_modeled(task)
    rgba = fresh.rgba.copy()
    for body, color in colors.items():
        rgba[model.geom(body).id, :3] = sc.COLORS[color]
    return Look(rgba, *(getattr(fresh, f.name) for f in fields(Look)[1:]))


@functools.cache
def _as_modeled(task: str) -> Look:
    """The task's own look; every episode's look starts from it, so it is read before any is written over it."""
    model = sc.load_scene(task).model
    table = model.geom("table").id
    return Look(
        rgba=model.geom_rgba.copy(),
        material=model.geom_matid[table : table + 1].copy(),
        light_dir=model.light_dir[0].copy(),
        light_diffuse=model.light_diffuse[0].copy(),
        light_ambient=np.array(model.vis.headlight.ambient, np.float32),
        camera_pos=model.cam_pos[model.camera(_CAMERA).id].copy(),
    )


def draw_look(task: str, colors: dict[str, str], strength: float, rng: np.random.Generator) -> Look:
    """A random look: hues, the table's pattern and color, and light of this strength, 0 to 1; 0: the plain one."""
    plain = plain_look(task, colors)
    if strength == 0:
        return plain
    model = sc.load_scene(task).model
    hue, light, pattern, background = (np.random.default_rng(s) for s in rng.integers(2**63, size=4))
    table = model.geom("table").id
    rgba = plain.rgba.copy()
    for body in range(model.nbody):
        shift = strength * hue.uniform(-MOST_HUE, MOST_HUE)
        for geom in range(model.body_geomadr[body], model.body_geomadr[body] + model.body_geomnum[body]):
            if geom != table:
                rgba[geom, :3] = _shift_hue(rgba[geom, :3], shift)
    table_hsv = (background.uniform(), background.uniform(0, 0.35), background.uniform(0.25, 0.5))
    rgba[table, :3] = colorsys.hsv_to_rgb(*table_hsv)
    rgba[model.geom("hand").id, :3] = rgba[model.geom("wrist").id, :3] = background.uniform(0.03, 0.3)
    names = [model.material(f"table_{i}").id for i in range(sc.NUM_TABLE_MATERIALS)]
    brightness = 1 + strength * light.uniform(-0.3, 0.3, 2)
    direction = plain.light_dir + np.append(strength * light.uniform(-0.8, 0.8, 2), 0.0)
    return Look(
        rgba=rgba,
        material=np.array([names[pattern.integers(len(names))]], plain.material.dtype),
        light_dir=direction / np.linalg.norm(direction),
        light_diffuse=(plain.light_diffuse * brightness[0]).astype(plain.light_diffuse.dtype),
        light_ambient=(plain.light_ambient * brightness[1]).astype(plain.light_ambient.dtype),
        camera_pos=plain.camera_pos,
    )


def _shift_hue(rgb: np.ndarray, shift: float) -> tuple[float, float, float]:
    hue, saturation, value = colorsys.rgb_to_hsv(*map(float, rgb))
    return colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value)


_MAX_GEOMS = 100
_OFF = ("SHADOW", "REFLECTION", "SKYBOX", "FOG", "HAZE")
_option = mujoco.MjvOption()
_option.geomgroup[:] = [1, 1, 0, 0, 0, 0]
_perturb = mujoco.MjvPerturb()


class _Drawing:
    """What is needed to draw images of one size. Holds for every model with the same textures."""

    def __init__(self, model: mujoco.MjModel, size: int) -> None:
        try:
            self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except mujoco.FatalError as error:
            raise gl.RenderError(gl.advice(error)) from error
        mujoco.mjr_resizeOffscreen(size, size, self.context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        for name in _OFF:
            self.scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0
        self.viewport = mujoco.MjrRect(0, 0, size, size)
        self.view = mujoco.MjvCamera()
        self.view.type = mujoco.mjtCamera.mjCAMERA_FIXED


_drawings: dict[int, _Drawing] = {}  # by image size


class Drawn(Protocol):
    """Something that is drawn, and is no part of the model."""

    def add_to(self, scene: mujoco.MjvScene) -> None:
        """Have it drawn with the scene."""
        ...


def render(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    camera: int,
    size: int,
    things: np.ndarray | None = None,
    besides: Sequence[Drawn] = (),
) -> np.ndarray:
    """The camera's view, uint8 (size, size, 3), upright RGB. Positions in `data` must be up to date.

    Args:
        things: uint8 (ngeom,), what each geom is part of: shows the structure in place of the picture
            (`vla_rl.data.segmentation.pack`).
        besides: shown in the picture, not in the structure.

    All models rendered in one process must have the same textures (`scene.mjcf` sees to that).

    Raises:
        sim.rendering.gl.RenderError: no GL context can be opened.
    """
    with gl.current():
        picture = _draw(model, data, camera, size, things, besides)
    return np.ascontiguousarray(picture[::-1])


def _draw(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    camera: int,
    size: int,
    things: np.ndarray | None,
    besides: Sequence[Drawn],
) -> np.ndarray:
    """`render`, bottom row first, in the current GL context."""
    if not _drawings:
        gl.at_exit(_drawings.clear)
    if size not in _drawings:
        _drawings[size] = _Drawing(model, size)
    drawing = _drawings[size]
    drawing.view.fixedcamid = camera
    everything = mujoco.mjtCatBit.mjCAT_ALL
    mujoco.mjv_updateScene(model, data, _option, _perturb, drawing.view, everything, drawing.scene)
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, drawing.context)  # another size's may be bound
    if things is not None:
        return draw_structure(model, drawing.scene, drawing.viewport, drawing.context, things)
    for thing in besides:
        thing.add_to(drawing.scene)
    mujoco.mjr_render(drawing.viewport, drawing.scene, drawing.context)
    image = np.empty((size, size, 3), np.uint8)
    mujoco.mjr_readPixels(image, None, drawing.viewport, drawing.context)
    return image


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
