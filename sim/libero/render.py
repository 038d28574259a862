"""Offscreen rendering of LIBERO scenes: one GL context per process, meshes and textures uploaded once per task."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections import OrderedDict

import mujoco
import numpy as np

from sim.libero.culling import Culling, Runs
from sim.libero.drawing import UploadedScene
from sim.rendering import gl
from sim.rendering.segmentation import draw_structure, things
from vla_rl.data.segmentation import BACKGROUND, TABLE

MAX_GEOMS = 1000  # as robosuite


_uploaded: OrderedDict[tuple[str, int, bool], UploadedScene] = OrderedDict()  # by task, image size, whether light
_option = mujoco.MjvOption()
_option.geomgroup[0] = 0  # collision shapes
_perturb = mujoco.MjvPerturb()


def _upload(name: str, model: mujoco.MjModel, runs: Runs, size: int, light: bool, max_contexts: int) -> UploadedScene:
    """The uploaded meshes and textures of a task, in the process's GL context; the oldest make room."""
    if not _uploaded:
        gl.at_exit(_uploaded.clear)
    key = (name, size, light)
    if key not in _uploaded:
        while len(_uploaded) >= max_contexts:
            _uploaded.popitem(last=False)[1].free()
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        try:
            _uploaded[key] = UploadedScene(model, runs, light)
        except mujoco.FatalError as error:
            raise gl.RenderError(gl.advice(error)) from error
    _uploaded.move_to_end(key)
    uploaded = _uploaded[key]
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, uploaded.context)
    return uploaded


class Renderer:
    """Renders one scene. Scenes of the same `key` (task) share what is uploaded.

    light: without antialiasing, reflections and small details of meshes; the pictures are others.
    """

    light = False

    def __init__(self, key: str, model: mujoco.MjModel, max_contexts: int) -> None:
        self.key, self.model, self.max_contexts = key, model, max_contexts
        self.scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        self._view = mujoco.MjvCamera()
        self.culling = Culling(model)
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def render(self, data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
        """The camera's view, uint8 (size, size, 3), rotated by 180 degrees from robosuite's, as OpenVLA does.

        Positions in `data` must be up to date.

        Raises:
            RenderError: no GL context can be opened.
        """
        with gl.current():
            uploaded, viewport = self.updated(data, camera, size)
            image = np.empty((size, size, 3), np.uint8)
            for number, drawing in enumerate(self.culling.drawings(self.scene, data, camera, size, not self.light)):
                if number > 0:
                    self.updated(data, camera, size)
                uploaded.draw(drawing, self.scene, viewport, image)
        return np.ascontiguousarray(image[::-1, ::-1])

    def structure(self, data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
        """What `render` shows, uint8 (size, size, 3), rotated likewise; see `vla_rl.data.segmentation.pack`."""
        with gl.current():
            uploaded, viewport = self.updated(data, camera, size)
            image = draw_structure(self.model, self.scene, viewport, uploaded.context, self._things)
        return np.ascontiguousarray(image[::-1, ::-1])

    @functools.cached_property
    def surfaces(self) -> list[int]:
        """The geoms that are seen of tables, floors and walls."""
        is_shown = self.model.geom_group != 0
        return np.flatnonzero(np.isin(self._things, (TABLE, BACKGROUND)) & is_shown).tolist()

    @functools.cached_property
    def _things(self) -> np.ndarray:
        return things(self.model)

    def updated(self, data: mujoco.MjData, camera: int, size: int) -> tuple[UploadedScene, mujoco.MjrRect]:
        """The scene as the camera sees it, ready to be drawn within `gl.current()`."""
        with gl.current():
            uploaded = _upload(self.key, self.model, self.culling.runs, size, self.light, self.max_contexts)
        self._view.fixedcamid = camera
        mujoco.mjv_updateScene(self.model, data, _option, _perturb, self._view, mujoco.mjtCatBit.mjCAT_ALL, self.scene)
        return uploaded, mujoco.MjrRect(0, 0, size, size)
