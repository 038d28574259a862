"""One LIBERO task's MuJoCo scene: built by robosuite, then reset, stepped, observed and saved here.

robosuite builds the model, samples placements and judges success. Stepping does what its `env.step`
does, to the last bit, in a third of the physics work: its three `mj_forward`s a substep are one
`mj_step1` / `mj_step2` pair around the controller.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from robosuite.controllers import load_controller_config
from robosuite.utils.errors import RandomizationError

from sim.base import pose_of
from sim.libero.control import ArmControl

NUM_SUBSTEPS = 25  # of 2 ms, in a control step of 50 ms
# robosuite's observables show the state after this substep (from 0) of a control step, not after the last.
SAMPLED_SUBSTEP = 23
PHYSICS = int(mujoco.mjtState.mjSTATE_INTEGRATION)
ARM_NOISE = 0.02  # rad, standard deviation of the arm's joints in the official states, as robosuite's default.
MIDDLE = np.array([0.6, 0.0, 0.0])  # meters, from the robot's base to about the middle of where it works
NEAR = 1e-4  # meters and radians; a sampled placement as near as this to an official one is drawn again


@dataclass(frozen=True)
class InitialState:
    """Where an episode starts, before settling.

    flat (1 + nq + nv,): time, positions, velocities. body_pos (nbody, 3), body_quat (nbody, 4): of the
    model, because fixtures are placed there.
    """

    flat: np.ndarray
    body_pos: np.ndarray
    body_quat: np.ndarray


@contextlib.contextmanager
def numpy_seed(seed: int | tuple | None) -> Iterator[None]:
    """numpy's global generator, which LIBERO draws from, seeded (or set to a saved state); restored afterwards."""
    before = np.random.get_state()
    try:
        if isinstance(seed, tuple):
            np.random.set_state(seed)
        else:
            np.random.seed(seed)
        yield
    finally:
        np.random.set_state(before)


class Scene:
    """The simulator of one task. Slow to make (seconds), fast to reset.

    Args:
        bddl_file: the task's objects, regions and goal.
        official: float64 (states, 1 + nq + nv), its official initial states.
    """

    def __init__(self, bddl_file: Path, official: np.ndarray) -> None:
        self.official = official
        self.env = _build(bddl_file, self.problem)
        self.model: mujoco.MjModel = self.env.sim.model._model
        self.data: mujoco.MjData = self.env.sim.data._data
        width = 1 + self.model.nq + self.model.nv
        if official.shape[1] != width:
            raise ValueError(
                f"{bddl_file.stem}: its official initial states have {official.shape[1]} values, its scene {width}: "
                "the LIBERO library and its init files do not belong together"
            )
        self.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)  # nothing reads the force sensor
        self._shown = mujoco.MjData(self.model)
        self._unplaced = _unplaced_fixtures(self.env)
        self._properties = list(self.env.object_property_initializers)
        self.env.visualize(dict.fromkeys(self.env._visualizations, False))
        self._site_rgba = self.model.site_rgba.copy()
        self._to_default_pose()
        self.control = ArmControl(self.env)
        robot = self.env.robots[0]
        self.arm_qpos = np.array(robot._ref_joint_pos_indexes)
        self.middle = self.data.body("robot0_base").xpos + MIDDLE
        self.finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes)
        self._hand_body = self.model.body(robot.robot_model.eef_name).id
        self._fixtures: list[tuple[np.ndarray, np.ndarray]] = []
        self._fixture_generator: int | tuple = 0
        self._contact_geoms: dict[int, np.ndarray] = {}
        self.env.check_contact = self._check_contact
        self._last_substep = np.zeros(mujoco.mj_stateSize(self.model, PHYSICS))
        self._shown_qpos = self.data.qpos.copy()
        self._shown_fingers = np.zeros(2)

    @staticmethod
    def problem(stock: type) -> type:
        """The class to build the scene with, from LIBERO's for the task's problem: that itself."""
        return stock

    # ------------------------------------------------------------------ initial states

    def official_state(self, index: int) -> InitialState:
        """The official state `index`, with the fixtures where OpenVLA's evaluation has them in its episode `index`.

        The files hold no fixture poses. OpenVLA seeds once per task (`env.seed(0)`) and then draws them
        anew in each `env.reset()`, so those of episode k follow from drawing k + 1 times.
        """
        while len(self._fixtures) <= index:
            self.env.object_property_initializers = self._properties * (
                len(self._fixtures) + 2
            )  # it adds its own again
            with numpy_seed(self._fixture_generator):
                self._sample()
                self._fixture_generator = np.random.get_state()
            self._fixtures.append((self.model.body_pos.copy(), self.model.body_quat.copy()))
        return InitialState(self.official[index], *self._fixtures[index])

    def sampled_state(self, seed: int) -> InitialState:
        """A fresh placement from the task's own regions, never an official one; the arm a little off, as in those."""
        self.env.object_property_initializers = self._properties
        arm = self.env.robots[0]._ref_joint_pos_indexes
        placed = np.setdiff1d(np.arange(self.model.nq), arm)
        with numpy_seed(seed):
            while True:
                self._sample()
                nearest = np.abs(self.official[:, 1 + placed] - self.data.qpos[placed]).max(1).min()
                if nearest > NEAR:
                    break
            self.data.qpos[arm] += np.random.normal(0.0, ARM_NOISE, len(arm))
        flat = np.concatenate([[0.0], self.data.qpos, self.data.qvel])
        return InitialState(flat, self.model.body_pos.copy(), self.model.body_quat.copy())

    def _sample(self) -> None:
        """Draw from LIBERO's placement sampler into `data` and `model`, again until it fits."""
        while True:
            # In a rebuilt model, as LIBERO resets, fixtures are at the origin when things in and on them are placed.
            for body, pos, quat in self._unplaced:
                self.model.body_pos[body], self.model.body_quat[body] = pos, quat
            mujoco.mj_resetData(self.model, self.data)
            try:
                self.env._reset_internal()
            except RandomizationError:
                continue
            return

    # ------------------------------------------------------------------ episodes

    def _to_default_pose(self) -> None:
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[self.env.robots[0]._ref_joint_pos_indexes] = np.array(self.env.robots[0].init_qpos) + 0.0
        mujoco.mj_forward(self.model, self.data)

    def start(self, state: InitialState) -> None:
        """Put everything into the initial state; nothing has settled yet."""
        self.model.body_pos[:], self.model.body_quat[:] = state.body_pos, state.body_quat
        self._to_default_pose()
        self.control.reset()
        self.model.site_rgba[:] = self._site_rgba
        nq = self.model.nq
        self.data.time = state.flat[0]
        self.data.qpos[:] = state.flat[1 : 1 + nq]
        self.data.qvel[:] = state.flat[1 + nq :]
        mujoco.mj_forward(self.model, self.data)

    def step(self, action: np.ndarray) -> bool:
        """One control step with an action (7,) in [-1, 1]. Returns whether the task's goal holds."""
        self.env._post_process()  # what lights up (a stove's burner) follows the state before this step
        model, data, control = self.model, self.data, self.control
        gripper = float(action[6])
        for substep in range(NUM_SUBSTEPS):
            mujoco.mj_step1(model, data)
            if substep == 0:
                control.set_goal(action)
            control.command(gripper)
            if substep == SAMPLED_SUBSTEP:
                self._shown_qpos = data.qpos.copy()
            elif substep == NUM_SUBSTEPS - 1:
                mujoco.mj_getState(model, data, self._last_substep, PHYSICS)
            mujoco.mj_step2(model, data)
            if substep == SAMPLED_SUBSTEP:
                self._shown_fingers = data.qpos[self.finger_qpos]
        return self.is_success()

    def is_success(self) -> bool:
        """Whether the goal of the task's BDDL file holds."""
        return bool(self.env._check_success())

    def shown(self) -> mujoco.MjData:
        """Positions of everything as robosuite's observation of the last control step shows them."""
        self._shown.qpos[:] = self._shown_qpos
        mujoco.mj_kinematics(self.model, self._shown)
        mujoco.mj_comPos(self.model, self._shown)
        mujoco.mj_camlight(self.model, self._shown)
        return self._shown

    def proprioception(self, shown: mujoco.MjData) -> np.ndarray:
        """float32 (8,): end effector position (m), axis-angle (rad), the two finger positions (m)."""
        w, x, y, z = shown.xquat[self._hand_body]
        return np.concatenate(
            [shown.site_xpos[self.control.site], axis_angle(np.array([x, y, z, w])), self._shown_fingers]
        ).astype(np.float32)

    def poses_of_interest(self) -> np.ndarray:
        """Poses of the objects, fixtures and regions that LIBERO lists as of interest, then of the gripper, as `shown`.

        float32 (n + 1, 4): x, y, z in meters; yaw, the turn about the vertical, in radians; NaN where the scene has no
        such thing.
        """
        shown, env, poses = self.shown(), self.env, []
        things = {**env.objects_dict, **env.fixtures_dict}
        for name in (*env.parsed_problem["obj_of_interest"], None):
            if name is None:
                part = shown.site(self.control.site)
            elif name in things:
                part = shown.body(things[name].root_body)
            elif name in env.object_sites_dict:
                part = shown.site(name)
            else:
                poses.append(np.full(4, np.nan))
                continue
            poses.append(pose_of(part))
        return np.asarray(poses, np.float32).reshape(-1, 4)

    # ------------------------------------------------------------------ keyframes

    def save(self) -> dict[str, np.ndarray]:
        """Everything the continuation depends on, as of the last control step."""
        control = self.control
        return {
            "physics": self._last_substep.copy(),
            "body_pos": self.model.body_pos.copy(),
            "body_quat": self.model.body_quat.copy(),
            "site_rgba": self.model.site_rgba.copy(),
            "goal_pos": control.goal_pos.copy(),
            "goal_ori": control.goal_ori.copy(),
            "finger_command": control.finger_command.copy(),
            "shown_qpos": self._shown_qpos.copy(),
            "shown_fingers": self._shown_fingers.copy(),
        }

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Back to a saved state, to the last bit.

        The saved physics is that before the last 2 ms, which are simulated again: what robosuite judges
        and shows after a step (contacts, poses) lags its joint positions by that much.

        Raises:
            ValueError: arrays missing, or of another scene's shape.
        """
        check_arrays(arrays, Scene.save(self))
        self.model.body_pos[:], self.model.body_quat[:] = arrays["body_pos"], arrays["body_quat"]
        self._to_default_pose()
        self.control.reset()
        self.model.site_rgba[:] = arrays["site_rgba"]
        mujoco.mj_setState(self.model, self.data, arrays["physics"], PHYSICS)
        self._last_substep = arrays["physics"].copy()
        mujoco.mj_step(self.model, self.data)
        self.control.restore(arrays["goal_pos"], arrays["goal_ori"], arrays["finger_command"])
        self._shown_qpos, self._shown_fingers = arrays["shown_qpos"].copy(), arrays["shown_fingers"].copy()

    # ------------------------------------------------------------------ contacts

    def _check_contact(self, first: object, second: object) -> bool:
        """robosuite's `check_contact` for two models, by geom number in place of loops over names."""
        pairs = self.data.contact.geom
        if not len(pairs):
            return False
        in_first, in_second = self._geoms(first)[pairs], self._geoms(second)[pairs]
        return bool(((in_first[:, 0] & in_second[:, 1]) | (in_first[:, 1] & in_second[:, 0])).any())

    def _geoms(self, thing: object) -> np.ndarray:
        """bool (ngeom,): which geoms are the thing's contact geoms."""
        if id(thing) not in self._contact_geoms:
            mask = np.zeros(self.model.ngeom, bool)
            mask[[self.model.geom(name).id for name in thing.contact_geoms]] = True
            self._contact_geoms[id(thing)] = mask
        return self._contact_geoms[id(thing)]


def check_arrays(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Refuse arrays of a keyframe that are missing, or not of the expected ones' shapes.

    Raises:
        ValueError: naming the array.
    """
    for name, now in expected.items():
        found = arrays[name].shape if name in arrays else "none"
        if found != now.shape:
            raise ValueError(f"keyframe array {name!r}: expected shape {now.shape}, found {found}")


def _build(bddl_file: Path, problem: Callable[[type], type]):
    """robosuite's environment for a task, as LIBERO makes it, but without renderer or camera observations.

    `problem` may put another class in place of LIBERO's.

    `library.import_library` must have been called; LIBERO is imported here so that nothing imports it before.
    """
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info

    made = problem(TASK_MAPPING[get_problem_info(str(bddl_file))["problem_name"]])
    for seed in range(100):
        with numpy_seed(seed), contextlib.suppress(RandomizationError):
            return made(
                str(bddl_file),
                robots=["Panda"],
                controller_configs=load_controller_config(default_controller="OSC_POSE"),
                initialization_noise=None,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                control_freq=20,
                hard_reset=False,
            )
    raise RuntimeError(f"LIBERO's sampler finds no placement of the objects of {bddl_file}")


def _unplaced_fixtures(env) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Body, position and quaternion of each fixture in the model's XML, before the sampler places it."""
    unplaced = []
    for fixture in env.fixtures_dict.values():
        element = env.model.worldbody.find(f".//body[@name='{fixture.root_body}']")
        pos = np.array(element.get("pos", "0 0 0").split(), np.float64)
        quat = np.array(element.get("quat", "1 0 0 0").split(), np.float64)
        unplaced.append((env.sim.model.body_name2id(fixture.root_body), pos, quat / np.linalg.norm(quat)))
    return unplaced


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Axis-angle (3,) in radians of a quaternion (x, y, z, w), by the formula of robosuite and OpenVLA (0 to 2 pi)."""
    w = np.clip(quaternion[3], -1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * np.arccos(w) / sine
