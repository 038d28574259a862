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

from sim.libero.control import ArmControl  # noqa: E402
from sim.libero.render import Renderer  # noqa: E402

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
        with _seeded(0):  # Lift draws the size of its cube when the scene is built: always the same one
            self.env = robosuite.make(
                task,
                robots="Panda",
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
        self.control = ArmControl(self.env)
        robot = self.env.robots[0]
        self._hand_body = self.model.body(robot.robot_model.eef_name).id
        self._finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes)
        self._num_substeps = int(self.env.control_timestep / self.env.model_timestep)

    def start(self, seed: int) -> None:
        """Draw an initial state with robosuite's own samplers. Same seed, same state."""
        with _seeded(seed):
            self.env.reset()
        mujoco.mj_forward(self.model, self.data)
        self.control.reset()

    def step(self, action: np.ndarray) -> bool:
        """One control step with an action (7,) in [-1, 1]. Returns robosuite's success check."""
        for substep in range(self._num_substeps):
            mujoco.mj_step1(self.model, self.data)
            if substep == 0:
                self.control.set_goal(action)
            self.control.command(float(action[6]))
            mujoco.mj_step2(self.model, self.data)
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
        """float32 (8,): end-effector position (m), axis-angle (rad), the two finger positions (m)."""
        w, x, y, z = self.data.xquat[self._hand_body]
        turn = transform_utils.quat2axisangle(np.array([x, y, z, w]))
        position, fingers = self.data.site_xpos[self.control.site], self.data.qpos[self._finger_qpos]
        return np.concatenate([position, turn, fingers]).astype(np.float32)

    def save(self) -> dict[str, np.ndarray]:
        """Everything that the rest of the episode depends on."""
        physics = np.zeros(mujoco.mj_stateSize(self.model, PHYSICS))
        mujoco.mj_getState(self.model, self.data, physics, PHYSICS)
        return {
            "physics": physics,
            "initial_joint": self.control.initial_joint.copy(),
            "goal_pos": self.control.goal_pos.copy(),
            "goal_ori": self.control.goal_ori.copy(),
            "finger_command": self.control.finger_command.copy(),
        }

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Back to a saved state, exactly.

        Raises:
            ValueError: arrays missing, or of another scene's shape.
        """
        self.start(0)  # also puts bodies of the model where every episode has them
        for name, now in self.save().items():
            found = arrays[name].shape if name in arrays else "none"
            if found != now.shape:
                raise ValueError(f"keyframe array {name!r}: expected shape {now.shape}, found {found}")
        mujoco.mj_setState(self.model, self.data, arrays["physics"], PHYSICS)
        self.refresh()
        self.control.initial_joint = arrays["initial_joint"].copy()
        self.control.restore(arrays["goal_pos"], arrays["goal_ori"], arrays["finger_command"])

    def close(self) -> None:
        """Let robosuite drop the simulator."""
        self.env.close()
