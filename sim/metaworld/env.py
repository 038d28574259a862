"""MetaWorld's environments one episode at a time, with their scripted experts. Importing this loads MetaWorld."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from sim.base import OwnRandomness, ReplayedEnv
from sim.rendering import gl
from sim.single_env import SingleObservation
from vla_rl.types import EnvSpec

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


VERSION = "-v3"  # of MetaWorld's names


class MetaWorldEnv(ReplayedEnv):
    """One episode at a time. Holds one scene per task that was asked for.

    Action (4,), each in [-1, 1]: dx, dy, dz (1 cm of the target at 1) and the gripper (below 0 opens, above 0 closes).
    State (4,): the hand's position in meters and how far the gripper is open, 0 to 1. Where the goal is, MetaWorld
    draws only in some tasks; the state never says it.
    """

    def __init__(
        self,
        spec: EnvSpec,
        cameras: Mapping[str, tuple[str, bool]],
        exact_rendering: bool,
        record_frames: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.cameras = spec, cameras
        self.exact_rendering, self.record_frames = exact_rendering, record_frames
        self._scenes: dict[str, tuple[Any, Renderer, Any]] = {}
        self._randomness = OwnRandomness()

    def _begin(self, task: str, seed: int) -> None:
        if task not in self._scenes:
            self._scenes[task] = self._load(task)
        self._scene, self._renderer, self._expert = self._scenes[task]
        with self._randomness(seed):
            self._scene.seed(seed)
            self._full, _ = self._scene.reset()
        for site in self._scene._target_site_config:  # else the first picture shows the goal of another draw
            self._scene._set_pos_site(*site)
        mujoco.mj_kinematics(self._scene.model, self._scene.data)

    def _load(self, task: str) -> tuple[Any, Renderer, Any]:
        scene = ALL_V3_ENVIRONMENTS[task + VERSION]()
        scene._partially_observable = False  # The expert sees the goal.
        scene.__dict__.pop("sawyer_observation_space", None)  # Its bounds follow from that.
        scene._freeze_rand_vec, scene.seeded_rand_vec, scene._set_task_called = False, True, True
        return scene, Renderer(task, scene.model, self.exact_rendering), ENV_POLICY_MAP[task + VERSION]()

    def _advance(self, action: np.ndarray) -> bool:
        """One control step. Returns MetaWorld's own success."""
        with self._randomness():
            self._full, _, _, _, info = self._scene.step(action.astype(np.float64))
        return bool(info["success"])

    def observe(self) -> SingleObservation:
        """Render the cameras, upright, and read the state."""
        images = {
            name: self._renderer.render(self._scene.data, *self.cameras[name], self.spec.image_size[0])
            for name in self.spec.cameras
        }
        return SingleObservation(images, self._full[:4].astype(np.float32), self._instruction)

    def expert_action(self) -> np.ndarray:
        """MetaWorld's own scripted policy of the task, within the bounds."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says that its actions are beyond the bounds, and what is done then.
            action = self._expert.get_action(self._full)
        return np.clip(np.asarray(action, np.float32), -1, 1)

    def close(self) -> None:
        """Drop the simulators."""
        for scene, _, _ in self._scenes.values():
            scene.close()
        self._scenes, self._task = {}, ""
