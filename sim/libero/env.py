"""LIBERO under OpenVLA's evaluation protocol: the options, and the environment over a task's scene.

Importing this loads no simulator: that comes with `LiberoConfig.make`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from sim.base import ObjectPosesConfig, PerturbableConfig, SegmentedConfig, check_known
from sim.libero.corruptions import corrupted
from sim.libero.library import ASSETS_VARIABLE, import_library, suite_tasks
from sim.libero.published import PublishedConfig, PublishedTask, assets_of, left_out, tasks_of
from sim.libero.suites import (
    CAMERAS,
    CONTROL_HZ,
    HORIZONS,
    NUM_OFFICIAL_STATES,
    TITLES,
    VIEWS,
    nearest_tasks,
    paraphrases,
    task_labels,
    why_not_offered,
)
from sim.perturb import Axis, Perturbation, Surfaces
from sim.rendering.devices import check_backend
from sim.single_env import SingleEnv, SingleObservation
from sim.vector.body import Collisions
from sim.vector.processes import simulated_body
from vla_rl.common.tables import libero_instruction
from vla_rl.config import ConfigError
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.rollout.body import Body
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

if TYPE_CHECKING:
    from sim.libero.scene import InitialState
    from sim.libero.scenes import TaskScene

JOINTS_OFF = (0.0, 0.04, 0.1, 0.2)  # radians, by level of `sim.perturb`, that each joint of the arm starts off
NUM_WAIT_STEPS = 10  # control steps with WAIT_ACTION after each reset, while objects settle
WAIT_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


class LiberoConfig(SegmentedConfig, ObjectPosesConfig, PerturbableConfig):
    """LIBERO's tasks under OpenVLA's evaluation protocol. Tasks are named, or numbered from 0 in LIBERO's order."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    # What LIBERO lists as of interest in a task, in its order: mostly what is to be handled, then where it goes.
    object_names: ClassVar[tuple[str, ...]] = ("interest_1", "interest_2", "interest_3", "interest_4", "gripper")
    perturb_axes: ClassVar[tuple[str, ...]] = get_args(Axis)
    suites: ClassVar[Mapping[str, str]] = TITLES
    averaged_suites: ClassVar[tuple[str, ...]] = tuple(suite for suite in TITLES if suite != "libero_90")
    kind: Literal["libero"] = "libero"
    suite: str = Field(default="libero_spatial", description=f"One of {', '.join(HORIZONS)}.")
    assets_path: Path | None = Field(
        default=None,
        description="Folder with LIBERO's meshes and textures; else $LIBERO_ASSETS, else the library's own download.",
    )
    image_size: PositiveInt = Field(default=256, le=1024, description="Height and width of the images, pixels.")
    rendering: Literal["exact", "light"] = Field(
        default="exact",
        description="exact: LIBERO's pictures, to the bit. light, for the rollouts of training alone: no antialiasing, "
        "no reflections, meshes without details below 4 mm; whatever is measured is measured with exact ones.",
    )
    horizon: PositiveInt | None = Field(
        default=None, description="Control steps before truncation; the suite's official number if not given."
    )

    published: PublishedConfig | None = Field(
        default=None,
        description="LIBERO-Plus's or LIBERO-PRO's perturbed tasks of the suite, {path: FOLDER} of a copy of their "
        "repository (docs/robustness.md); null: LIBERO's own.",
    )

    @field_validator("suite")
    @classmethod
    def _known_suite(cls, value: str) -> str:
        check_known("LIBERO suite", value, HORIZONS, "Suites")
        return value

    @model_validator(mode="after")
    def _known_tasks(self) -> LiberoConfig:
        if self.published is not None and self.perturb is not None:
            raise ConfigError(
                "env.perturb: not together with env.published, whose tasks are perturbed; set one to null"
            )
        if self.tasks:
            try:
                self.task_names()
            except ValueError as error:
                raise ConfigError(f"env.tasks: {error}") from None
        return self

    def in_suite(self, suite: str) -> LiberoConfig:
        """See `EnvConfig.in_suite`; `tasks` must be numbers, or none for all of the suite."""
        if named := [task for task in self.tasks if not task.isdecimal()]:
            raise ConfigError(
                f"env.tasks: {named[0]!r} is a task of {self.suite} alone; for several suites give numbers, or [] for "
                "all tasks of each"
            )
        return type(self).model_validate({**self.model_dump(), "suite": suite})

    def task_names(self) -> tuple[str, ...]:
        """The names of the chosen tasks, numbers resolved.

        Raises:
            ValueError: an unknown task; the message has the nearest names.
            ImportError: the LIBERO library is not installed.
        """
        known = tuple(self.published_tasks()) or suite_tasks(self.suite)
        return tuple(_resolve_task(task, known, self.suite) for task in self.tasks) or known

    def published_tasks(self) -> dict[str, PublishedTask]:
        """The published tasks that `tasks` chooses from, by name; none unless `published`."""
        return {} if self.published is None else tasks_of(self.published, self.suite, self.assets_path)

    def check_machine(self) -> None:
        """Refuse a MUJOCO_GL that is no back end."""
        check_backend()

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; starts no simulator."""
        tasks = self.task_names()
        horizon = self.horizon or HORIZONS[self.suite]
        spec = self._arm_spec(
            "libero", {task: libero_instruction(task) for task in tasks}, dict.fromkeys(tasks, horizon), CONTROL_HZ
        )
        moves = self.perturb is not None and self.perturb.axis == "camera"
        known = "agentview" in self.cameras and self.suite in VIEWS and not moves
        if self.published is not None:
            return self._published_spec(spec, horizon)
        return replace(
            spec,
            num_eval_states=dict.fromkeys(tasks, NUM_OFFICIAL_STATES),
            approximation="light rendering, not LIBERO's pictures" if self.rendering == "light" else "",
            projections={"agentview": VIEWS[self.suite].projection()} if known else {},
            suite=f"{self.suite}+{self.perturbation_name}" if self.perturb else self.suite,
            labels={task: label for task, label in task_labels(suite_tasks(self.suite)).items() if task in tasks},
            official={**self._official(horizon), "tasks": (str(len(tasks)), str(len(suite_tasks(self.suite))))},
        )

    def _published_spec(self, spec: EnvSpec, horizon: int) -> EnvSpec:
        assert self.published is not None
        every = self.published_tasks()
        chosen = [every[task] for task in spec.tasks]
        lacking = left_out(self.published, self.suite, {task.name: task for task in chosen})
        return replace(
            spec,
            tasks={task.name: task.instruction for task in chosen},
            num_eval_states={task.name: task.num_states for task in chosen},
            approximation="light rendering, not LIBERO's pictures" if self.rendering == "light" else "",
            suite=f"{chosen[0].benchmark}/{self.suite}",
            labels={task.name: task.name for task in chosen},
            groups={task.name: (task.dimension, task.level) for task in chosen},
            official={**self._official(horizon), "tasks": (f"{len(chosen)}{lacking and f' ({lacking})'}", "all")},
        )

    def _official(self, horizon: int) -> dict[str, tuple[str, str]]:
        """OpenVLA's protocol beside this one; see `EnvSpec.official`."""
        other = self.assets_path or os.environ.get(ASSETS_VARIABLE)
        changed = f"{self.perturb.axis}, level {self.perturb.level}" if self.perturb else "none"
        return {
            "control steps": (str(horizon), str(HORIZONS[self.suite])),
            "pixels": (f"{self.image_size} x {self.image_size}", "256 x 256"),
            "pictures": (self.rendering, "exact"),
            "meshes and textures": ("of another folder, stand-ins perhaps" if other else "LIBERO's", "LIBERO's"),
            "perturbation": (changed, "none"),
        }

    def without_expert(self) -> dict[str, str]:
        """See `EnvConfig.without_expert`: by what was measured."""
        reasons = {task: why_not_offered(self.suite, task) for task in self.task_names()}
        return {task: reason for task, reason in reasons.items() if reason}

    def exact(self) -> LiberoConfig:
        """The same with exact pictures, and success as the simulator says."""
        same = super().exact()
        return same if self.rendering == "exact" else same.model_copy(update={"rendering": "exact"})

    def build_body(self) -> Body:
        """See `EmbodiedConfig.build_body`: the arm, with LIBERO's controller and fixtures."""
        return simulated_body(self)

    def make(self, record_frames: bool = False) -> LiberoEnv:
        """One environment. Loads the LIBERO library; each task's scene is built at its first reset (seconds)."""
        return LiberoEnv(self, record_frames)


def _resolve_task(task: str, known: tuple[str, ...], suite: str) -> str:
    if task in known:
        return task
    if task.isdecimal() and int(task) < len(known):
        return known[int(task)]
    if task.isdecimal():
        raise ValueError(f"{suite} has tasks 0 to {len(known) - 1}, got {task}")
    raise ValueError(
        f"unknown task {task!r} of {suite}. Nearest: {', '.join(nearest_tasks(task, known))}. "
        f"The numbers 0 to {len(known) - 1} work too."
    )


class LiberoEnv(SingleEnv):
    """One LIBERO episode at a time.

    Action (7,) in [-1, 1]: OSC_POSE deltas (0.05 m and 0.5 rad at 1), gripper -1 open, +1 closed.
    State (8,): end effector position (m), axis-angle (rad), two finger positions (m). Images are turned
    by 180 degrees from robosuite's, as OpenVLA does. `eval` is the 50 official initial states; `train`
    and `validation` are placements freshly sampled from the task's BDDL regions, the arm's joints too.
    """

    def __init__(self, config: LiberoConfig, record_frames: bool = False) -> None:
        self.config = config
        self.spec = config.env_spec()
        self.record_frames = record_frames
        import_library(assets_of(config.published, config.assets_path))
        self._published = config.published_tasks()
        self._loaded: TaskScene | None = None
        self._instruction = ""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode: official or sampled state, then ten wait steps. The first of a task takes seconds.

        Raises:
            ValueError: unknown task or split, an index that is negative or not among the official
                states, or another task's keyframe.
        """
        self.begin(spec)
        return self.observe()

    def begin(self, spec: EpisodeSpec) -> None:
        """`reset`, without drawing anything."""
        self._check(spec)
        self._perturbation = Perturbation(self.config.perturb, spec)
        loaded = self._load(spec.task)
        own = self.spec.tasks[spec.task]
        self._instruction = spec.instruction or self._perturbation.rephrased(own, paraphrases(own))
        self.horizon = self.spec.horizon[spec.task]
        self.num_steps = 0
        if spec.keyframe is not None:
            loaded.scene.restore(spec.keyframe.arrays)
            self.num_steps = spec.keyframe.step
            if "distractors" not in spec.keyframe.arrays:
                loaded.scatter(self._perturbation.level("distractors"), self._perturbation.rng())
        elif (start := self._start_name(spec)) in loaded.starts:
            loaded.scene.restore(loaded.starts[start])
        else:
            self._start(loaded, spec)
        loaded.begin_episode()

    def _check(self, spec: EpisodeSpec) -> None:
        if spec.task not in self.spec.tasks:
            nearest = ", ".join(nearest_tasks(spec.task, self.spec.tasks))
            raise ValueError(f"unknown task {spec.task!r} of this {self.config.suite} environment. Nearest: {nearest}.")
        if self._published and spec.split != "eval":
            raise ValueError(f"split: got {spec.split!r}; published tasks have their own states alone: eval.split=eval")
        if spec.split not in SPLITS:
            raise ValueError(f"split: got {spec.split!r}, allowed: {', '.join(SPLITS)}")
        if spec.index < 0 or (spec.split == "eval" and spec.index >= self.spec.num_eval_states[spec.task]):
            most = (
                f"; {spec.task} has {self.spec.num_eval_states[spec.task]} official states"
                if spec.split == "eval"
                else ""
            )
            raise ValueError(f"index {spec.index} of split {spec.split!r}: must be from 0{most}")
        if spec.keyframe is not None and (spec.keyframe.env, spec.keyframe.task) != ("libero", spec.task):
            raise ValueError(
                f"this keyframe is of {spec.keyframe.env}/{spec.keyframe.task}, the episode is of libero/{spec.task}"
            )

    def _load(self, task: str) -> TaskScene:
        from sim.libero.scenes import borrow  # Loads LIBERO and robosuite.

        crowded = self._perturbation.level("distractors") > 0
        if self._loaded is not None and (self._loaded.task, self._loaded.crowded) == (task, crowded):
            return self._loaded
        self.close()
        self._loaded = borrow(self.config.suite, task, crowded, self._published.get(task))
        self._loaded.renderer.light = self.config.rendering == "light"
        return self._loaded

    def _start(self, loaded: TaskScene, spec: EpisodeSpec) -> None:
        if spec.split == "eval":
            state = loaded.scene.official_state(spec.index)
        else:
            state = loaded.scene.sampled_state(self.seed_of(spec))
        if level := self._perturbation.level("robot"):
            arm, rng = loaded.scene.arm_qpos, self._perturbation.rng()
            flat = state.flat.copy()
            flat[1 + arm] += JOINTS_OFF[level] * rng.uniform(0.6, 1, len(arm)) * rng.choice([-1, 1], len(arm))
            state = replace(state, flat=flat)
        self._settle(loaded, state)
        if level := self._perturbation.level("layout"):
            self._settle(loaded, loaded.rearranged(state, level, self._perturbation.rng()))
        loaded.scatter(self._perturbation.level("distractors"), self._perturbation.rng())
        loaded.remember(*self._start_name(spec), loaded.scene.save())

    def _settle(self, loaded: TaskScene, state: InitialState) -> None:
        loaded.scene.start(state)
        for _ in range(NUM_WAIT_STEPS):
            loaded.scene.step(WAIT_ACTION)

    def _start_name(self, spec: EpisodeSpec) -> tuple[str, int]:
        """What a settled start is remembered by, in a scene that environments share."""
        moves = any(self._perturbation.level(axis) for axis in ("robot", "layout", "distractors"))
        return f"{spec.split} {self._perturbation.name if moves else ''}", spec.index

    def seed_of(self, spec: EpisodeSpec) -> int:
        """What seeds the placement of a `train` or `validation` state: suite, task, split and index."""
        return zlib.crc32(f"{self.config.suite}/{spec.task}/{spec.split}/{spec.index}".encode())

    @property
    def loaded(self) -> TaskScene:
        """The scene of the current episode's task."""
        assert self._loaded is not None, "reset the environment before using it"
        return self._loaded

    @property
    def model(self) -> Collisions:
        """Of the current episode's scene."""
        return self.loaded.scene.model

    def proprioception(self) -> np.ndarray:
        """The state without the perturbation's noise, float32 (8,)."""
        scene = self.loaded.scene
        return scene.proprioception(scene.shown())

    def apply(self, action: np.ndarray) -> bool:
        """One control step (50 ms)."""
        return self.loaded.scene.step(np.asarray(action, np.float64))

    def observe(self) -> SingleObservation:
        """Render the configured cameras and read the state."""
        loaded, model = self.loaded, self.loaded.scene.model
        standing, middle = [model.camera(CAMERAS["agentview"]).id], loaded.scene.middle
        with self._perturbation.look(model, standing, middle, Surfaces(loaded.renderer.surfaces)):
            shown = loaded.scene.shown()
            images = {
                name: loaded.renderer.render(shown, model.camera(CAMERAS[name]).id, self.config.image_size)
                for name in self.config.cameras
            }
            if self.config.structure:
                for name in self.config.cameras:
                    camera = model.camera(CAMERAS[name]).id
                    images[CAMERA_PREFIX + name] = loaded.renderer.structure(shown, camera, self.config.image_size)
        published = self._published.get(loaded.task)
        if published is not None and published.noise and "agentview" in images:
            rng = np.random.default_rng([zlib.crc32(loaded.task.encode()), self.num_steps])
            images["agentview"] = corrupted(images["agentview"], published.noise, rng)
        obs = SingleObservation(images, loaded.scene.proprioception(shown), self._instruction)
        return self._perturbation.seen(obs, self.num_steps)

    def object_poses(self) -> np.ndarray:
        """See `SingleEnv.object_poses`: of what LIBERO lists as of interest in the task, as observations show it."""
        poses = np.full((len(self.spec.objects), 4), np.nan, np.float32)
        *found, poses[-1] = self.loaded.scene.poses_of_interest()
        poses[: len(found)] = np.reshape(found[: len(poses) - 1], (-1, 4))
        return poses

    def expert_action(self) -> np.ndarray:
        """The scripted expert's next action, float32 (7,). Only for tasks that it was measured to solve.

        Raises:
            NotImplementedError: it is not offered for the task; says why.
        """
        if reason := why_not_offered(self.config.suite, self.loaded.task):
            raise NotImplementedError(reason)
        return self.loaded.expert.action()

    def save_state(self) -> Keyframe:
        return Keyframe("libero", self.loaded.task, self.num_steps, self.loaded.scene.save())

    def close(self) -> None:
        """Give the scene back to the process's pool."""
        if self._loaded is not None:
            self._loaded.give_back()
            self._loaded = None
