"""robosuite 1.4's nine tasks in the set-up of its benchmark, with LIBERO's conventions and instructions.

Everything comes from the package's own assets. Images are upright (robosuite's arrays start at the bottom row).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from sim.base import ObjectPosesConfig, SegmentedConfig, check_horizons, check_known
from sim.rendering.devices import check_backend
from sim.robosuite.expert import TASKS, WITH_EXPERT, act, tasks_with
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.config import ConfigError
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

if TYPE_CHECKING:
    from sim.robosuite.scene import Scene

# Our name -> robosuite's.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand", "second_wrist": "robot1_eye_in_hand"}
# What is told of poses -> robosuite's body; the gripper is the first arm's.
BODIES = {
    **{name: f"{name}_main" for name in ("cube", "cubeA", "cubeB", "Milk", "Bread", "Cereal", "Can")},
    **{"SquareNut": "SquareNut_main", "RoundNut": "RoundNut_main", "peg1": "peg1", "peg2": "peg2"},
    **{"door": "Door_door", "latch": "Door_latch", "pot": "pot_root", "peg": "peg_main", "hole": "hole_main"},
    **{"hammer": "hammer_root", "gripper": ""},
}
CONTROL_HZ = 20.0
MAX_INDEX = 2**30  # initial states in each split: the seed is split * 2**30 + index, so splits share none


class RobosuiteConfig(SegmentedConfig, ObjectPosesConfig):
    """robosuite tasks under OSC_POSE control, 20 Hz: with one Panda arm, or with two arms opposite each other."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    object_names: ClassVar[tuple[str, ...]] = tuple(BODIES)
    kind: Literal["robosuite"] = "robosuite"
    arms: Literal[1, 2] = Field(
        default=1,
        description="1: 7 actions, 8 numbers of state; 2: 14 and 16, the first arm's first, for TwoArm tasks.",
    )
    image_size: int = Field(default=128, ge=32, le=1024, description="Height and width of the rendered images, pixels.")
    exact_rendering: bool = Field(
        default=False, description="Reflections and shadows as robosuite draws them; three times slower on a CPU."
    )
    horizons: dict[str, int] = Field(default={}, description="Control steps before truncation, for tasks that differ.")

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            check_known("robosuite task", name, TASKS)
        return value

    @field_validator("horizons")
    @classmethod
    def _known_horizons(cls, value: dict[str, int]) -> dict[str, int]:
        check_horizons("robosuite task", value, TASKS)
        return value

    @model_validator(mode="after")
    def _check_arms(self) -> RobosuiteConfig:
        for name in self.tasks:
            if (arms := len(TASKS[name].robots)) != self.arms:
                raise ConfigError(
                    f"env.tasks: {name} has {arms} arm{'s' * (arms > 1)} ({7 * arms} actions), env.arms is {self.arms}"
                    f"; all tasks of an environment have as many actions. Set env.arms={arms}, or choose among "
                    f"{', '.join(tasks_with(self.arms))}"
                )
        if self.arms == 1 and "second_wrist" in self.cameras:
            raise ConfigError("env.cameras: second_wrist is on the second arm; leave it out, or set env.arms=2")
        return self

    def check_machine(self) -> None:
        """Refuse a MUJOCO_GL that is no back end."""
        check_backend()

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; does not import robosuite."""
        tasks = {name: TASKS[name] for name in self.tasks or tasks_with(self.arms)}
        spec = self._arm_spec(
            "robosuite",
            {name: task.instruction for name, task in tasks.items()},
            {name: self.horizons.get(name, task.horizon) for name, task in tasks.items()},
            CONTROL_HZ,
        )
        if self.arms == 1:
            return spec
        ones = np.ones(14, np.float32)
        return replace(spec, state_dim=16, action_dim=14, action_low=-ones, action_high=ones)

    def without_expert(self) -> dict[str, str]:
        """See `EnvConfig.without_expert`."""
        tasks = self.tasks or tasks_with(self.arms)
        return {name: "robosuite has no scripted expert for it" for name in tasks if name not in WITH_EXPERT}

    def make(self, record_frames: bool = False) -> RobosuiteEnv:
        """One environment; a task's scene is loaded at its first reset (seconds).

        Raises:
            ImportError: robosuite is not installed.
        """
        if importlib.util.find_spec("robosuite") is None:
            raise ImportError("the robosuite environments need the package: pip install '.[robosuite]'")
        return RobosuiteEnv(self, record_frames)


class RobosuiteEnv(SingleEnv):
    """One episode at a time. Holds one scene per task that was asked for.

    Action (7,), each in [-1, 1]: dx, dy, dz (5 cm at 1) and axis-angle turn (0.5 rad at 1) of the
    end effector from where it is, gripper (below 0 opens, above 0 closes; nothing in Wipe and TwoArmPegInHole, whose
    arms have none). State (8,): see `Scene.proprioception`. With two arms (14,) and (16,).
    """

    def __init__(self, config: RobosuiteConfig, record_frames: bool = False) -> None:
        self.config = config
        self.spec = config.env_spec()
        self.record_frames = record_frames
        self._scenes: dict[str, Scene] = {}
        self._task = ""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: an unknown task or split, an index out of range, or a keyframe of another
                environment or task.
        """
        from sim.robosuite.scene import Scene

        check_known("robosuite task", spec.task, self.spec.tasks)
        if spec.split not in SPLITS or not 0 <= spec.index < MAX_INDEX:
            raise ValueError(f"no initial state {spec.index} in split {spec.split!r}: indices are below {MAX_INDEX}")
        if spec.task not in self._scenes:
            self._scenes[spec.task] = Scene(spec.task, self.config.exact_rendering)
        self._scene, self._task = self._scenes[spec.task], spec.task
        self._instruction = spec.instruction or TASKS[spec.task].instruction
        self.horizon = self.spec.horizon[spec.task]
        if spec.keyframe is None:
            self._scene.start(SPLITS.index(spec.split) * MAX_INDEX + spec.index)
            self.num_steps = 0
            return self.observe()
        found = f"{spec.keyframe.env}/{spec.keyframe.task}"
        if found != f"robosuite/{spec.task}":
            raise ValueError(f"this keyframe is of {found}, the episode asked for is of robosuite/{spec.task}")
        self._scene.restore(spec.keyframe.arrays)
        self.num_steps = spec.keyframe.step
        return self.observe()

    def apply(self, action: np.ndarray) -> bool:
        """One control step. Returns robosuite's own success check."""
        return self._scene.step(np.asarray(action, np.float64))

    def observe(self) -> SingleObservation:
        """Render the configured cameras and read the state."""
        self._scene.refresh()
        images = {name: self._scene.image(CAMERAS[name], self.config.image_size) for name in self.config.cameras}
        if self.config.structure:
            for name in self.config.cameras:
                images[CAMERA_PREFIX + name] = self._scene.structure(CAMERAS[name], self.config.image_size)
        return SingleObservation(images, self._scene.proprioception(), self._instruction)

    def object_poses(self) -> np.ndarray:
        """See `SingleEnv.object_poses`."""
        self._scene.refresh()
        return np.array([self._scene.pose(BODIES[name]) for name in self.spec.objects], np.float32)

    def save_state(self) -> Keyframe:
        """The state at the last observation."""
        return Keyframe("robosuite", self._task, self.num_steps, self._scene.save())

    def expert_action(self) -> np.ndarray:
        """A scripted pick (and place), from the state of the simulator alone: it keeps no memory."""
        return act(self._task, self._scene.env)

    def close(self) -> None:
        """Drop the simulators. What is uploaded for drawing belongs to the process."""
        for scene in self._scenes.values():
            scene.close()
        self._scenes = {}
        self._task = ""
