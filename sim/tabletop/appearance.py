"""Appearance of a tabletop episode: colors, table pattern, light and camera."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import colorsys
import functools
from dataclasses import dataclass, fields

import mujoco
import numpy as np

from sim.tabletop import scene as sc

_CAMERA = "agentview"
MOST_HUE = 0.03  # Largest hue shift of an object, fraction of the color circle: it keeps its name.


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
