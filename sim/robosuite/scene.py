"""One robosuite task's MuJoCo scene: built, placed and judged by robosuite 1.4, stepped and rendered here.

Stepping leaves out robosuite's observables and redundant `mj_forward` calls, as our LIBERO does.
Importing this loads robosuite.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import mujoco
import numpy as np

logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it warns about a private macro file at import

import robosuite  # noqa: E402
from robosuite.controllers import load_controller_config  # noqa: E402
from robosuite.utils import transform_utils  # noqa: E402

from sim.base import pose_of  # noqa: E402
from sim.libero.control import ArmControl  # noqa: E402
from sim.libero.render import Renderer  # noqa: E402
from sim.libero.scene import check_arrays  # noqa: E402
from sim.robosuite.expert import TASKS  # noqa: E402

CONTROL_HZ = 20
FAST_SHADOW_SIZE = 1024  # texels of the shadow map's side when not drawing exactly; robosuite's is 4096
MAX_CONTEXTS = 16  # drawing contexts kept in a process
PHYSICS = int(mujoco.mjtState.mjSTATE_INTEGRATION)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within it numpy's global generator, which robosuite draws from, starts at `seed`; afterwards it is as before."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


class Scene:
    """The simulator of one task, slow to make (seconds), fast to reset.

    Args:
        exact: draw as robosuite does; otherwise reflections are left out and shadows coarser.
    """

    def __init__(self, task: str, exact: bool) -> None:
        with _seeded(0):  # Some draw sizes when the scene is built, as Lift that of its cube: always the same ones
            self.env = robosuite.make(
                task,
                robots=list(TASKS[task].robots),
                controller_configs=load_controller_config(default_controller="OSC_POSE"),
                has_renderer=False,
                has_offscreen_renderer=False,
                use_camera_obs=False,
                use_object_obs=False,
                control_freq=CONTROL_HZ,
                ignore_done=True,
                hard_reset=False,
            )
        self.model: mujoco.MjModel = self.env.sim.model._model
        self.data: mujoco.MjData = self.env.sim.data._data
        if not exact:
            self.model.mat_reflectance[:] = 0
            self.model.vis.quality.shadowsize = FAST_SHADOW_SIZE
        self.renderer = Renderer(f"robosuite/{task}/{exact}", self.model, MAX_CONTEXTS)
        self.arms = [_Arm(self.env, number) for number in range(len(self.env.robots))]
        self._wipes = task == "Wipe"
        self._num_substeps = int(self.env.control_timestep / self.env.model_timestep)

    def start(self, seed: int) -> None:
        """Draw an initial state with robosuite's own samplers. Same seed, same state."""
        with _seeded(seed):
            self.env.reset()
        mujoco.mj_forward(self.model, self.data)
        for arm in self.arms:
            arm.control.reset()

    def step(self, action: np.ndarray) -> bool:
        """One control step with an action (7 an arm,) in [-1, 1]. Returns robosuite's success check."""
        parts = action.reshape(len(self.arms), 7)
        for substep in range(self._num_substeps):
            mujoco.mj_step1(self.model, self.data)
            for arm, part in zip(self.arms, parts, strict=True):
                if substep == 0:
                    arm.control.set_goal(part)
                arm.control.command(float(part[6]))
            mujoco.mj_step2(self.model, self.data)
        if self._wipes:
            self.env.reward(action)  # which is where robosuite marks dirt as wiped
        return bool(self.env._check_success())

    def refresh(self) -> None:
        """Bring positions and contacts, one substep (2 ms) behind after a step, up to date with the joints.

        What is seen and saved is then a function of the physics state alone. Physics goes on the same.
        """
        mujoco.mj_fwdPosition(self.model, self.data)

    def image(self, camera: str, size: int) -> np.ndarray:
        """uint8 (size, size, 3), upright. Call `refresh` first."""
        rotated = self.renderer.render(self.data, self.model.camera(camera).id, size)  # LIBERO's images are mirrored
        return np.ascontiguousarray(rotated[:, ::-1])

    def structure(self, camera: str, size: int) -> np.ndarray:
        """What `image` shows; see `vla_rl.data.segmentation.pack`."""
        rotated = self.renderer.structure(self.data, self.model.camera(camera).id, size)
        return np.ascontiguousarray(rotated[:, ::-1])

    def proprioception(self) -> np.ndarray:
        """float32 (8 an arm,): end-effector position (m), axis-angle (rad), the two finger positions (m; else 0)."""
        return np.concatenate([arm.proprioception(self.data) for arm in self.arms]).astype(np.float32)

    def pose(self, body: str) -> np.ndarray:
        """See `sim.base.pose_of`; of no body: the first arm's end effector. NaN where there is none."""
        if not body:
            return pose_of(self.data.site(self.arms[0].control.site))
        found = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_BODY, body)
        return pose_of(self.data.body(found)) if found >= 0 else np.full(4, np.nan)

    def save(self) -> dict[str, np.ndarray]:
        """Everything that the rest of the episode depends on."""
        physics = np.zeros(mujoco.mj_stateSize(self.model, PHYSICS))
        mujoco.mj_getState(self.model, self.data, physics, PHYSICS)
        arrays = {"physics": physics, **self._placed()}
        for arm in self.arms:
            arrays |= {name + arm.suffix: array for name, array in arm.save().items()}
        if self._wipes:
            wiped = [marker in self.env.wiped_markers for marker in self.env.model.mujoco_arena.markers]
            arrays["wiped"] = np.array(wiped)
        return arrays

    def _placed(self) -> dict[str, np.ndarray]:
        """Of the model: a door and dirt are placed there."""
        return {"body_pos": self.model.body_pos.copy(), "body_quat": self.model.body_quat.copy()}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Back to a saved state, exactly.

        Raises:
            ValueError: arrays missing, or of another scene's shape.
        """
        self.start(0)
        check_arrays(arrays, self.save())
        self.model.body_pos[:], self.model.body_quat[:] = arrays["body_pos"], arrays["body_quat"]
        mujoco.mj_setState(self.model, self.data, arrays["physics"], PHYSICS)
        if self._wipes:
            markers = self.env.model.mujoco_arena.markers
            self.env.wiped_markers = [markers[number] for number in np.flatnonzero(arrays["wiped"])]
            for marker in self.env.wiped_markers:
                self.model.geom(marker.visual_geoms[0]).rgba[3] = 0
        self.refresh()
        for arm in self.arms:
            arm.restore({name: arrays[name + arm.suffix] for name in arm.save()})

    def close(self) -> None:
        """Let robosuite drop the simulator."""
        self.env.close()


class _Arm:
    """One of a scene's arms: its control, and where its senses are."""

    def __init__(self, env: robosuite.environments.base.MujocoEnv, number: int) -> None:
        robot = env.robots[number]
        self.suffix = f"_{number}" if number else ""
        self.control = ArmControl(env, number)
        self._hand_body = self.control.model.body(robot.robot_model.eef_name).id
        self._finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes or [], int)

    def proprioception(self, data: mujoco.MjData) -> np.ndarray:
        w, x, y, z = data.xquat[self._hand_body]
        turn = transform_utils.quat2axisangle(np.array([x, y, z, w]))
        fingers = np.zeros(2)
        fingers[: len(self._finger_qpos)] = data.qpos[self._finger_qpos]
        return np.concatenate([data.site_xpos[self.control.site], turn, fingers])

    def save(self) -> dict[str, np.ndarray]:
        control = self.control
        return {
            "initial_joint": control.initial_joint.copy(),
            "goal_pos": control.goal_pos.copy(),
            "goal_ori": control.goal_ori.copy(),
            "finger_command": control.finger_command.copy(),
        }

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        self.control.initial_joint = arrays["initial_joint"].copy()
        self.control.restore(arrays["goal_pos"], arrays["goal_ori"], arrays["finger_command"])
