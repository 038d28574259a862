"""Offscreen rendering: one drawing context per image size and process, shared by all environments."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mujoco
import numpy as np

from sim.rendering import gl
from sim.rendering.segmentation import draw_structure

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
