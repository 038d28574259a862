"""Offscreen rendering of MetaWorld's scenes, in the process's one GL context."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from collections import OrderedDict

import mujoco
import numpy as np

from sim.rendering import gl

MAX_GEOMS = 1000
MAX_UPLOADED = 16  # tasks whose meshes and textures are kept on the graphics side
OFF = ("SHADOW", "REFLECTION", "SKYBOX", "FOG", "HAZE")
_option = mujoco.MjvOption()
_perturb = mujoco.MjvPerturb()
_uploaded: OrderedDict[tuple[str, int, bool], mujoco.MjrContext] = OrderedDict()  # by task, image size, exactness


class Renderer:
    """Renders one scene. Scenes of the same task share what is uploaded."""

    def __init__(self, task: str, model: mujoco.MjModel, exact: bool) -> None:
        self.task, self.model, self.exact = task, model, exact
        self._scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
        if not exact:
            model.vis.quality.offsamples = 0
            for name in OFF:
                self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0
        self._view = mujoco.MjvCamera()
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def render(self, data: mujoco.MjData, camera: str, on_its_head: bool, size: int) -> np.ndarray:
        """The camera's view, uint8 (size, size, 3), upright RGB. Positions in `data` must be up to date.

        Raises:
            RenderError: no GL context can be opened.
        """
        self._view.fixedcamid = self.model.camera(camera).id
        image = np.empty((size, size, 3), np.uint8)
        viewport = mujoco.MjrRect(0, 0, size, size)
        with gl.current():
            context = self._upload(size)
            everything = mujoco.mjtCatBit.mjCAT_ALL
            mujoco.mjv_updateScene(self.model, data, _option, _perturb, self._view, everything, self._scene)
            mujoco.mjr_render(viewport, self._scene, context)
            mujoco.mjr_readPixels(image, None, viewport, context)
        return np.ascontiguousarray(image[:, ::-1] if on_its_head else image[::-1])

    def _upload(self, size: int) -> mujoco.MjrContext:
        if not _uploaded:
            gl.at_exit(_uploaded.clear)
        key = (self.task, size, self.exact)
        if key not in _uploaded:
            while len(_uploaded) >= MAX_UPLOADED:
                _uploaded.popitem(last=False)[1].free()
            self.model.vis.global_.offwidth = self.model.vis.global_.offheight = size
            try:
                _uploaded[key] = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
            except mujoco.FatalError as error:
                raise gl.RenderError(gl.advice(error)) from error
        _uploaded.move_to_end(key)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, _uploaded[key])
        return _uploaded[key]
