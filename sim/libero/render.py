"""Offscreen rendering of LIBERO scenes: a GL context per process, meshes uploaded once a task, drawn in runs of faces.

Drawing parts of a scene: a model's meshes uploaded in runs of faces, and mjr_render called for some of them.

Or all of it with less: `light` is without antialiasing and reflections, and meshes lose details below THINNED.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import mujoco
import numpy as np

from sim.libero.culling import Culling, Drawing, Runs
from sim.rendering import gl
from sim.rendering.gl import draw_structure, things
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


THINNED = 0.004  # meters: of the vertices in a cube of this side, a light drawing has one
_NONE = int(mujoco.mjtGeom.mjGEOM_NONE)
_REFLECTION = int(mujoco.mjtRndFlag.mjRND_REFLECTION)


class UploadedScene:
    """A model's meshes and textures in the current GL context, whole and in runs; or whole and light.

    Raises:
        mujoco.FatalError: the GL context cannot hold them.
    """

    def __init__(self, model: mujoco.MjModel, runs: Runs, light: bool) -> None:
        from OpenGL import GL

        self._gl = GL
        quality = model.vis.quality
        samples, quality.offsamples = quality.offsamples, 0 if light else quality.offsamples
        try:
            self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        finally:
            quality.offsamples = samples
        self._model, self._runs = model, runs
        cut = np.flatnonzero(runs.first >= 0)
        if light:
            for mesh in np.unique(model.geom_dataid[runs.geom[cut]]):
                self._upload_thinned(int(mesh))
            cut = cut[:0]
        self._num_lists = 2 * len(cut) + model.ngeom
        self._first_list: int = self._gl.glGenLists(max(1, self._num_lists))
        self._list_of_run = np.full(len(runs.geom), -1)
        self._list_of_run[cut] = self._first_list + 2 * np.arange(len(cut))
        self._runs_of_geom = {geom: cut[runs.geom[cut] == geom] for geom in np.unique(runs.geom[cut])}
        for run in cut:
            self._upload(run)

    def _upload(self, run: int) -> None:
        """Have MuJoCo upload a mesh as if it had no other faces, into a display list of the run's own."""
        model, mesh = self._model, self._model.geom_dataid[self._runs.geom[run]]
        before = model.mesh_faceadr[mesh], model.mesh_facenum[mesh], model.mesh_graphadr[mesh], self.context.baseMesh
        model.mesh_faceadr[mesh], model.mesh_facenum[mesh] = self._runs.first[run], self._runs.faces[run]
        model.mesh_graphadr[mesh] = -1  # no convex hull
        self.context.baseMesh = int(self._list_of_run[run]) - 2 * int(mesh)
        mujoco.mjr_uploadMesh(model, self.context, mesh)
        model.mesh_faceadr[mesh], model.mesh_facenum[mesh], model.mesh_graphadr[mesh], self.context.baseMesh = before

    def _upload_thinned(self, mesh: int) -> None:
        """Have MuJoCo upload a mesh with one vertex in each small cube, without the faces that this makes empty."""
        model = self._model
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        start = model.mesh_vertadr[mesh]
        vertices = model.mesh_vert[start : start + model.mesh_vertnum[mesh]]
        cubes = np.floor(vertices / THINNED).astype(np.int64)
        _, kept, cube = np.unique(cubes, axis=0, return_index=True, return_inverse=True)
        places = vertices[kept][cube.reshape(-1)]
        corners = cube.reshape(-1)[model.mesh_face[first : first + count]]
        solid = (corners != np.roll(corners, 1, 1)).all(1)
        changed = [model.mesh_face, model.mesh_facenormal]
        if model.mesh_texcoordadr[mesh] >= 0:
            changed.append(model.mesh_facetexcoord)
        before = [array[first : first + count].copy() for array in changed]
        whole, graph = vertices.copy(), model.mesh_graphadr[mesh]
        vertices[:] = places
        for array, rows in zip(changed, before, strict=True):
            array[first : first + int(solid.sum())] = rows[solid]
        model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = int(solid.sum()), -1
        mujoco.mjr_uploadMesh(model, self.context, mesh)
        model.mesh_facenum[mesh], model.mesh_graphadr[mesh] = count, graph
        for array, rows in zip(changed, before, strict=True):
            array[first : first + count] = rows
        vertices[:] = whole

    def draw(self, drawing: Drawing, scene: mujoco.MjvScene, viewport: mujoco.MjrRect, image: np.ndarray) -> None:
        """Draw into image, uint8 (size, size, 3), bottom row first. Update the scene before, and again after."""
        for index in np.flatnonzero(~drawing.geoms):
            scene.geoms[index].type = _NONE
        for index in np.flatnonzero(drawing.geoms):
            geom = scene.geoms[index]
            if drawing.mirror is not None and index > drawing.mirror:
                geom.reflectance = 0  # MuJoCo has one mirror, the first, also when that is left out
            runs = self._runs_of_geom.get(geom.objid) if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM else None
            if runs is not None and not drawing.runs[runs].all():
                self._choose(geom, runs[drawing.runs[runs]])
        flag = scene.flags[_REFLECTION]
        scene.flags[_REFLECTION] = drawing.reflects and flag
        mujoco.mjr_render(viewport, scene, self.context)
        scene.flags[_REFLECTION] = flag
        if drawing.pixels is None:
            mujoco.mjr_readPixels(image, None, viewport, self.context)
            return
        left, bottom, width, height = drawing.pixels
        part = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(part, None, mujoco.MjrRect(*drawing.pixels), self.context)
        image[bottom : bottom + height, left : left + width] = part

    def _choose(self, geom: Any, runs: np.ndarray) -> None:
        """Have a mesh drawn by these of its runs, in their order."""
        number = self._first_list + self._num_lists - self._model.ngeom + geom.objid
        self._gl.glNewList(number, self._gl.GL_COMPILE)
        for run in runs:
            self._gl.glCallList(int(self._list_of_run[run]))
        self._gl.glEndList()
        geom.dataid = number - self.context.baseMesh

    def free(self) -> None:
        """Give the memory back. The GL context must be current."""
        self._gl.glDeleteLists(self._first_list, max(1, self._num_lists))
        self.context.free()
