"""Options of the LIBERO simulator, and the facts about it that need no simulator: tasks, horizons, cameras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field, PositiveInt, field_validator, model_validator

from sim.base import SimConfig, check_known
from sim.gl_devices import check_backend
from sim.libero.library import suite_tasks
from sim.libero.measured import why_not_offered
from sim.libero.suites import (
    CAMERAS,
    CONTROL_HZ,
    HORIZONS,
    NUM_OFFICIAL_STATES,
    TITLES,
    VIEWS,
    nearest_tasks,
    task_labels,
)
from sim.perturb import Axis
from vla_rl.common.task_names import libero_instruction
from vla_rl.config import ConfigError
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from sim.libero.env import LiberoEnv


class LiberoConfig(SimConfig):
    """LIBERO's tasks under OpenVLA's evaluation protocol. Tasks are named, or numbered from 0 in LIBERO's order."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    shows_structure: ClassVar[bool] = True
    # What LIBERO lists as of interest in a task, in its order: mostly what is to be handled, then where it goes.
    object_names: ClassVar[tuple[str, ...]] = ("interest_1", "interest_2", "interest_3", "interest_4")
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
    max_scenes: PositiveInt = Field(
        default=10, description="Idle task scenes kept loaded in a process; more memory, fewer reloads."
    )

    @field_validator("suite")
    @classmethod
    def _known_suite(cls, value: str) -> str:
        check_known("LIBERO suite", value, HORIZONS, "Suites")
        return value

    @model_validator(mode="after")
    def _known_tasks(self) -> LiberoConfig:
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
        known = suite_tasks(self.suite)
        return tuple(_resolve_task(task, known, self.suite) for task in self.tasks) or known

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
        return replace(
            spec,
            num_eval_states=dict.fromkeys(tasks, NUM_OFFICIAL_STATES),
            approximation="light rendering, not LIBERO's pictures" if self.rendering == "light" else "",
            projections={"agentview": VIEWS[self.suite].projection()} if known else {},
            suite=f"{self.suite}+{self.perturbation_name}" if self.perturb else self.suite,
            labels={task: label for task, label in task_labels(suite_tasks(self.suite)).items() if task in tasks},
        )

    def without_expert(self) -> dict[str, str]:
        """See `EnvConfig.without_expert`: by what was measured."""
        reasons = {task: why_not_offered(self.suite, task) for task in self.task_names()}
        return {task: reason for task, reason in reasons.items() if reason}

    def exact(self) -> LiberoConfig:
        """The same with exact pictures, and success as the simulator says."""
        same = super().exact()
        return same if self.rendering == "exact" else same.model_copy(update={"rendering": "exact"})

    def make(self, record_frames: bool = False) -> LiberoEnv:
        """One environment. Loads the LIBERO library; each task's scene is built at its first reset (seconds)."""
        from sim.libero.env import LiberoEnv

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
