"""One tabletop environment: LIBERO's conventions for actions, state and cameras over the MuJoCo scene."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import mujoco
import numpy as np
from pydantic import Field, field_validator

from sim.base import ObjectPosesConfig, PerturbableConfig, SegmentedConfig, check_horizons
from sim.perturb import Perturbation, Surfaces
from sim.rendering.devices import check_backend
from sim.single_env import SingleEnv, SingleObservation
from sim.tabletop import scene as sc
from sim.tabletop.appearance import Look, draw_distractors, draw_look, render
from sim.tabletop.expert import CLOSE_ENOUGH, OPEN, RELEASE_STEPS, Expert, ExpertConfig, reaches
from sim.tabletop.tasks import (
    CONTROL_HZ,
    HOME,
    HORIZONS,
    INSTRUCTIONS,
    RESET_TASKS,
    REST_SPEED,
    Knock,
    Layout,
    SuccessConfig,
    View,
    check_tasks,
    draw_knock,
    draw_layout,
    episode_rng,
    is_solved_now,
    knocked_velocity,
    scene_of,
    spread_out,
)
from sim.vector.body import Collisions
from sim.vector.processes import simulated_body
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.rollout.body import Body
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

POSITION_SCALE = 0.05  # meters of travel for an action of 1
ROTATION_SCALE = 0.5  # radians of turn for an action of 1
TURN_LIMIT = np.array([1.5, 0.5, 0.5])  # commanded yaw, pitch and roll away from pointing down, radians
LEASH = 0.04  # how far the commanded position may run ahead of the gripper, meters
HOME_STEPS = 60  # control steps, at most, that the way home takes, and that everything has to come to rest
AT_HOME = 0.004  # meters
STEP_SECONDS = sc.TIMESTEP * sc.SUBSTEPS
# By level of `sim.perturb`, from 0: how much wider objects start, meters; how many times as far they are turned; and
# how far off the gripper starts, meters and radians.
MARGINS = (0.0, 0.012, 0.022, 0.032)
TURNED = (1.0, 2.0, 3.5, 5.0)
GRIPPER_OFF = (0.0, 0.015, 0.04, 0.08)
GRIPPER_TURNED = (0.0, 0.07, 0.2, 0.45)
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_BAD = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)


# By default MuJoCo writes its warnings to a file in the working directory.
mujoco.set_mju_user_warning(logging.getLogger("mujoco").warning)


class TabletopConfig(SegmentedConfig, ObjectPosesConfig, PerturbableConfig):
    """The built-in tabletop: five language-conditioned tasks, one that undoes another, a floating gripper, 20 Hz."""

    known_cameras: ClassVar[tuple[str, ...]] = ("agentview", "wrist")
    object_names: ClassVar[tuple[str, ...]] = (
        "block", "block_b", "block_c", "base", "bowl", "plate", "zone", "gripper",
    )  # fmt: skip
    perturb_axes: ClassVar[tuple[str, ...]] = (
        "camera", "light", "texture", "distractors", "layout", "robot", "noise", "wording",
    )  # fmt: skip
    reset_tasks: ClassVar[Mapping[str, str]] = RESET_TASKS
    kind: Literal["tabletop"] = "tabletop"
    image_size: int = Field(default=64, ge=32, le=256, description="Height and width of the rendered images, pixels.")
    horizons: dict[str, int] = Field(default={}, description="Control steps before truncation, for tasks that differ.")
    block_yaw: float = Field(default=0.15, ge=0, le=0.79, description="Largest turn of a block at the start, radians.")
    start_spread: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the starting positions' spread that is used, about one typical layout; small is easy.",
    )
    looks: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Strength of random looks, drawn from the episode's seed: hues, light, the table's pattern and "
        "color. Physics and layout do not change. 0: the plain one.",
    )
    expert: ExpertConfig = ExpertConfig()
    knock: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the episodes in which somebody knocks the block away, once, as no demonstration shows.",
    )
    success: SuccessConfig = SuccessConfig()

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_tasks(value)

    @field_validator("horizons")
    @classmethod
    def _known_horizons(cls, value: dict[str, int]) -> dict[str, int]:
        check_horizons("tabletop task", value, INSTRUCTIONS)
        return value

    def check_machine(self) -> None:
        """Refuse a MUJOCO_GL that is no back end."""
        check_backend()

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; starts nothing."""
        tasks = self.tasks or tuple(task for task in INSTRUCTIONS if task not in RESET_TASKS)
        spec = self._arm_spec(
            "tabletop",
            {task: INSTRUCTIONS[task] for task in tasks},
            {task: self.horizons.get(task, HORIZONS[task]) for task in tasks},
            CONTROL_HZ,
        )
        moves = self.perturb is not None and self.perturb.axis == "camera"
        known = "agentview" in self.cameras and not moves
        return replace(
            spec, projections={"agentview": sc.VIEW.projection()} if known else {}, suite=self.perturbation_name
        )

    def build_body(self) -> Body:
        """See `EmbodiedConfig.build_body`: the floating gripper."""
        return simulated_body(self)

    def make(self, record_frames: bool = False) -> TabletopEnv:
        """One environment. The first image rendered opens the process's GL context."""
        return TabletopEnv(self, record_frames)


class TabletopEnv(SingleEnv):
    """The built-in simulator, one episode at a time.

    Action (7,), each in [-1, 1]: dx, dy, dz (5 cm at 1), axis-angle turn in the world's frame
    (0.5 rad at 1), gripper (below 0 opens, above 0 closes, 0 keeps). Deltas move the commanded
    pose, which a stiff servo follows within the step. Unlike LIBERO's controller the delta adds to
    the commanded pose, not to the measured one, so that a held load causes no drift.

    State (8,): gripper position in meters, its axis-angle in radians (pointing down is about
    (pi, 0, 0)), the two finger positions in meters, the second one negative, as robosuite's Panda.
    """

    def __init__(self, config: TabletopConfig, record_frames: bool = False) -> None:
        self.config = config
        self.spec = config.env_spec()
        self.record_frames = record_frames
        self._data: dict[str, mujoco.MjData] = {}
        self._task = ""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: an unknown task (the message lists them), one left out of `tasks`, an
                unknown split, a negative index, or a keyframe of another environment or task.
        """
        self.begin(spec)
        return self.observe()

    def begin(self, spec: EpisodeSpec) -> None:
        """`reset`, without drawing anything."""
        self._start(spec)
        if spec.keyframe is not None:
            self._restore(spec.keyframe, spec.instruction)

    @property
    def model(self) -> Collisions:
        """Of the current task's scene, which the process shares."""
        return self._scene.model

    def _start(self, spec: EpisodeSpec) -> None:
        check_tasks((spec.task,))
        if spec.task not in self.spec.tasks:
            raise ValueError(f"task {spec.task!r} is not among this environment's tasks: {', '.join(self.spec.tasks)}")
        if spec.split not in SPLITS or spec.index < 0:
            raise ValueError(
                f"no initial state {spec.index} of split {spec.split!r}: splits are {', '.join(SPLITS)}, indices from 0"
            )
        self._task = spec.task
        self._scene = sc.load_scene(spec.task)
        if spec.task not in self._data:
            self._data[spec.task] = mujoco.MjData(self._scene.model)
        self._now = data = self._data[spec.task]
        self._view = View(self._scene, data)
        self._perturbation = Perturbation(self.config.perturb, spec)
        layout = draw_layout(spec, self.config.block_yaw, self.config.start_spread)
        if level := self._perturbation.level("layout"):
            layout = spread_out(layout, spec.task, MARGINS[level], TURNED[level])
        level = self._perturbation.level("distractors")
        self._distractors = draw_distractors(layout, level, self._perturbation.rng())
        self._begin_elsewhere(layout)
        data.qpos[6:8] = data.ctrl[12:14] = sc.OPEN_WIDTH
        for name, (x, y, yaw) in layout.places.items():
            self._put(name, x, y, yaw)
        self._expert = Expert(spec.task, self.config.expert, episode_rng(spec, "habit"))
        self._steps_since_expert = 1  # As if it had been asked one step ago.
        self._instruction = spec.instruction or layout.instruction(spec.task, self._perturbation)
        rng = episode_rng(spec, "appearance")
        self._look = draw_look(spec.task, layout.colors, self.config.looks, rng)
        self._knock = draw_knock(spec, self.config.knock)
        self._diverged = False
        self.num_steps = self._held = 0
        self.horizon = self.spec.horizon[spec.task]

    def _begin_elsewhere(self, layout: Layout) -> None:
        """Reset, with the gripper where the layout has it, and off from there on the axis `robot`."""
        mujoco.mj_resetData(self._scene.model, self._now)
        level, rng = self._perturbation.level("robot"), self._perturbation.rng()
        off = GRIPPER_OFF[level] * rng.uniform(0.6, 1, 3) * rng.choice([-1, 1], 3)
        yaw = GRIPPER_TURNED[level] * rng.uniform(0.6, 1) * rng.choice([-1, 1])
        self._now.qpos[:3] = self._now.act[:3] = np.clip(layout.gripper + off, sc.REACH_LOW, sc.REACH_HIGH)
        self._now.qpos[3] = self._now.act[3] = yaw
        self._target_rotation = np.array([yaw, 0.0, 0.0])

    def _put(self, name: str, x: float, y: float, yaw: float) -> None:
        if name in self._scene.mocap:
            self._now.mocap_pos[self._scene.mocap[name]] = (x, y, 0.0)
            return
        below = sc.PLATE_HEIGHT if self._task == "take_off" else 0.0
        height = below + {"base": sc.BASE_HALF[2], "bowl": 0.0}.get(name, sc.HALF)
        address = self._scene.qpos[name]
        self._now.qpos[address : address + 7] = (x, y, height, math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2))

    def apply(self, action: np.ndarray) -> bool:
        """One control step. Returns whether the task is solved (its conditions have held long enough).

        Physics that diverges ends the episode as a truncated failure.
        """
        assert self._task, "reset() must come before apply()"
        data, model = self._now, self._scene.model
        self._steps_since_expert += 1
        command = data.act[:3]
        target = np.clip(command + POSITION_SCALE * np.asarray(action[:3], np.float64), sc.REACH_LOW, sc.REACH_HIGH)
        target = np.clip(target, data.qpos[:3] - LEASH - POSITION_SCALE, data.qpos[:3] + LEASH + POSITION_SCALE)
        turn = np.asarray(action[3:6], np.float64) * ROTATION_SCALE
        if turn.any():
            self._target_rotation = np.clip(_turned(self._target_rotation, turn), -TURN_LIMIT, TURN_LIMIT)
        data.ctrl[0:6:2] = data.ctrl[1:6:2] = (target - command) / STEP_SECONDS
        data.ctrl[6:12:2] = data.ctrl[7:12:2] = (self._target_rotation - data.act[3:6]) / STEP_SECONDS
        if action[6] != 0:
            data.ctrl[12:14] = sc.OPEN_WIDTH if action[6] < 0 else 0.0
        if self.num_steps == self._knock.step:
            address = self._scene.qvel["block"]
            data.qvel[address : address + 2] = knocked_velocity(self._knock, self._view.position("block"))
        mujoco.mj_step(model, data, sc.SUBSTEPS)
        if any(data.warning[kind].number for kind in _BAD):
            mujoco.mj_resetData(model, data)
            self.num_steps, self._diverged = self.horizon, True
            return False
        self._held = self._held + 1 if is_solved_now(self._task, self._view) else 0
        return self._held >= self.config.success.hold_steps

    def observe(self) -> SingleObservation:
        """Render the configured cameras and read the state."""
        assert self._task, "reset() must come before observe()"
        data, model = self._now, self._scene.model
        mujoco.mj_kinematics(model, data)
        self._look.write(model)
        surfaces = Surfaces([model.geom("table").id], [model.material(f"table_{i}").id for i in (1, 2, 3)])
        with self._perturbation.look(model, [model.camera("agentview").id], np.zeros(3), surfaces):
            mujoco.mj_camlight(model, data)
            images = {
                name: render(model, data, model.camera(name).id, self.config.image_size, besides=self._distractors)
                for name in self.config.cameras
            }
            if self.config.structure:
                for name in self.config.cameras:
                    camera, ids = model.camera(name).id, self._scene.things
                    images[CAMERA_PREFIX + name] = render(model, data, camera, self.config.image_size, ids)
        return self._perturbation.seen(
            SingleObservation(images, self.proprioception(), self._instruction), self.num_steps
        )

    def proprioception(self) -> np.ndarray:
        """The state without the perturbation's noise, float32 (8,)."""
        qpos = self._now.qpos
        return np.array([*qpos[:3], *_axis_angle(qpos[3:6]), qpos[6], -qpos[7]], np.float32)

    def object_poses(self) -> np.ndarray:
        """See `SingleEnv.object_poses`."""
        poses = np.full((len(self.spec.objects), 4), np.nan, np.float32)
        for row, name in enumerate(self.spec.objects):
            if name in self._scene.qpos or name in self._scene.mocap:
                poses[row] = *self._view.position(name), self._view.yaw(name)
            elif name == "gripper":
                poses[row] = self._now.qpos[:4]
        return poses

    def expert_action(self) -> np.ndarray:
        """The scripted expert's next action, float32 (7,). Call once per control step: the expert has memory.

        Where others have driven since it was last asked, it takes over from the state that they have left.
        """
        if self._steps_since_expert > 1:
            self._expert.take_over(self._view, self._now.act[:3])
        self._steps_since_expert = 0
        return self._expert.act(self._view, self._now.act[:3], self._target_rotation)

    def expert_remaining(self) -> float:
        """About how many control steps the expert would need from here; 0 where it has nothing left to do, infinite
        where what it has to handle is out of reach."""
        return self._expert.remaining(self._view, self._now.act[:3])

    def drive_home(self) -> Keyframe | None:
        """See `SingleEnv.drive_home`: lets go, rises, and goes to the middle of where the gripper starts."""
        data, home = self._now, np.array(HOME)
        self._knock = Knock(-1, (0.0, 0.0))
        for step in range(HOME_STEPS):
            at, there = data.act[:3], np.abs(data.qpos[:3] - home).max() < AT_HOME
            if there and all(self._view.speed(name) < REST_SPEED for name in self._scene.qvel):
                break
            goal = home if at[2] > home[2] - AT_HOME else np.array([*at[:2], home[2]])
            goal = at if step < RELEASE_STEPS else goal
            turn = -self._target_rotation[[2, 1, 0]] / ROTATION_SCALE
            self.apply(np.clip([*(goal - at) / POSITION_SCALE, *turn, OPEN], -1, 1).astype(np.float32))
        if self._diverged or not reaches(self._view.position("block"), CLOSE_ENOUGH[0]):
            return None
        return Keyframe("tabletop", self._task, 0, self._scene_arrays())

    def _scene_arrays(self) -> dict[str, np.ndarray]:
        """What there is to know of the scene, whatever the task is and how far it has got."""
        physics = np.empty(mujoco.mj_stateSize(self._scene.model, _STATE))
        mujoco.mj_getState(self._scene.model, self._now, physics, _STATE)
        return {"physics": physics, "rotation": self._target_rotation.copy(), **self._look.to_arrays()}

    def save_state(self) -> Keyframe:
        """Everything that the rest of the episode depends on; there is no other random state."""
        arrays = {
            **self._scene_arrays(),
            "held": np.array([self._held]),
            "contact": np.array([self._view.gripper_touches()]),  # Not restored: it says what happens here.
            "expert": self._expert.memory(),
            "steps_since_expert": np.array([self._steps_since_expert]),
            "knock": np.array([self._knock.step, *self._knock.velocity]),
            "instruction": np.frombuffer(self._instruction.encode(), np.uint8),
        }
        return Keyframe("tabletop", self._task, self.num_steps, arrays)

    def _restore(self, keyframe: Keyframe, instruction: str | None) -> None:
        if keyframe.env != "tabletop" or scene_of(keyframe.task) != scene_of(self._task):
            raise ValueError(
                f"this keyframe is of {keyframe.env}/{keyframe.task}, the episode asked for is of "
                f"tabletop/{self._task}, whose scene is another"
            )
        model, arrays = self._scene.model, keyframe.arrays
        size = mujoco.mj_stateSize(model, _STATE)
        if arrays["physics"].shape != (size,):
            raise ValueError(
                f"this keyframe's physics state has shape {arrays['physics'].shape}, expected ({size},): "
                "it was written by another version of the simulator; record it again"
            )
        mujoco.mj_setState(model, self._now, arrays["physics"], _STATE)
        self._target_rotation, self._look = np.array(arrays["rotation"]), Look.from_arrays(arrays)
        if keyframe.task != self._task or "expert" not in arrays:
            return  # The scene alone: an episode begins in it.
        self._held = int(arrays["held"][0])
        self._expert.restore(arrays["expert"])
        self._steps_since_expert = int(arrays.get("steps_since_expert", [1])[0])
        step, *velocity = arrays.get("knock", [-1, 0, 0])
        self._knock = Knock(int(step), (float(velocity[0]), float(velocity[1])))
        self._instruction = instruction or bytes(arrays["instruction"]).decode()
        self.num_steps = keyframe.step

    def close(self) -> None:
        """Drop the simulator's data. Models and the renderer belong to the process."""
        self._data.clear()
        self._task = ""


def _rotation(angles: np.ndarray) -> np.ndarray:
    """Quaternion (w, x, y, z) of yaw, pitch, roll: the gripper's joints in order."""
    yaw, pitch, roll = (float(a) / 2 for a in angles)
    cy, sy, cp, sp, cr, sr = (f(a) for a in (yaw, pitch, roll) for f in (math.cos, math.sin))
    return np.array(
        [
            cy * cp * cr + sy * sp * sr,
            cy * cp * sr - sy * sp * cr,
            cy * sp * cr + sy * cp * sr,
            sy * cp * cr - cy * sp * sr,
        ]
    )


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = np.empty(4)
    mujoco.mju_mulQuat(result, a, b)
    return result


def _turned(angles: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Yaw, pitch, roll after a further axis-angle `turn` in the world's frame, radians."""
    angle = float(np.linalg.norm(turn))
    delta = np.empty(4)
    mujoco.mju_axisAngle2Quat(delta, turn / angle, angle)
    w, x, y, z = _multiply(delta, _rotation(angles))
    return np.array(
        [
            math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)),
            math.asin(max(-1.0, min(1.0, 2 * (w * y - z * x)))),
            math.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y)),
        ]
    )


def _axis_angle(angles: np.ndarray) -> np.ndarray:
    """Axis-angle (3,) of the gripper's frame, whose z axis points down; the sign with x >= 0, so that it is
    continuous about the home orientation (pi, 0, 0)."""
    quat = _multiply(_rotation(angles), np.array([0.0, 1.0, 0.0, 0.0]))
    if quat[1] < 0:
        quat = -quat
    sine = float(np.linalg.norm(quat[1:]))
    return quat[1:] / sine * (2 * math.atan2(sine, float(quat[0])))
