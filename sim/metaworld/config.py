"""Options of MetaWorld. Imports no simulator."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from sim.base import SimConfig, check_horizons, check_known
from sim.metaworld.tasks import CAMERAS, CONTROL_HZ, HORIZON, INSTRUCTIONS
from sim.rendering.devices import check_backend
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from sim.metaworld.env import MetaWorldEnv


class MetaWorldConfig(SimConfig):
    """MetaWorld's tasks (version 3 of its environments) with the Sawyer arm, 80 Hz."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    kind: Literal["metaworld"] = "metaworld"
    image_size: int = Field(default=128, ge=16, le=1024, description="Height and width of the rendered images, pixels.")
    horizon: PositiveInt = Field(default=HORIZON, le=HORIZON, description="Control steps before truncation.")
    horizons: dict[str, int] = Field(default={}, description="Control steps before truncation, for tasks that differ.")
    exact_rendering: bool = Field(
        default=False, description="Shadows, reflections and antialiasing as MetaWorld draws them; slower on a CPU."
    )

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            check_known("MetaWorld task", name, INSTRUCTIONS)
        return value

    @field_validator("horizons")
    @classmethod
    def _known_horizons(cls, value: dict[str, int]) -> dict[str, int]:
        check_horizons("MetaWorld task", value, INSTRUCTIONS)
        if above := {task: steps for task, steps in value.items() if steps > HORIZON}:
            raise ValueError(f"MetaWorld ends an episode after {HORIZON} control steps; got {above}")
        return value

    def check_machine(self) -> None:
        """Refuse a MUJOCO_GL that is no back end."""
        check_backend()

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; does not import MetaWorld."""
        tasks = self.tasks or tuple(INSTRUCTIONS)
        return EnvSpec(
            kind="metaworld",
            tasks={task: INSTRUCTIONS[task] for task in tasks},
            horizon={task: self.horizons.get(task, self.horizon) for task in tasks},
            cameras=self.cameras,
            image_size=(self.image_size, self.image_size),
            state_dim=4,
            action_dim=4,
            action_low=-np.ones(4, np.float32),
            action_high=np.ones(4, np.float32),
            control_hz=CONTROL_HZ,
        )

    def make(self, record_frames: bool = False) -> MetaWorldEnv:
        """One environment; a task's scene is loaded at its first reset.

        Raises:
            ImportError: MetaWorld is not installed.
        """
        if importlib.util.find_spec("metaworld") is None:
            raise ImportError(
                "the MetaWorld environments need the package: pip install --no-deps metaworld==3.1.1; or "
                "env.kind=remote with a Python of its own (docs/metaworld.md)"
            )
        from sim.metaworld.env import MetaWorldEnv

        return MetaWorldEnv(self.env_spec(), self.exact_rendering, record_frames)
