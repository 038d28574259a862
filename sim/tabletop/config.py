"""Options of the tabletop simulator, and the facts about it that need no MuJoCo: tasks, horizons, cameras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from sim.base import SimConfig, check_horizons
from sim.gl_devices import check_backend
from sim.tabletop.facts import CONTROL_HZ, HORIZONS, INSTRUCTIONS, RESET_TASKS, VIEW, check_tasks
from vla_rl.config import Config
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from sim.tabletop.env import TabletopEnv


class AppearanceConfig(Config):
    """Random looks, drawn from the episode's seed; physics and layout do not change. All off by default."""

    hue: float = Field(
        default=0.0, ge=0, le=0.03, description="Largest hue shift of objects, fraction of the color circle."
    )
    light: float = Field(default=0.0, ge=0, le=1, description="Strength of random light direction and brightness.")
    camera: float = Field(
        default=0.0, ge=0, le=0.05, description="Largest shift of the agentview camera per axis, meters."
    )
    table_texture: bool = Field(default=False, description="Draw the table's pattern from several.")
    background: bool = Field(default=False, description="Draw the table's and the gripper's colors.")


class HabitConfig(Config):
    """A sloppy expert's systematic habits: the same mistake each time, undone by a small shift of behavior."""

    place_short: float = Field(
        default=0.0, ge=0, le=0.15, description="How far short (towards -x) it places or pushes, m."
    )
    place_short_std: float = Field(
        default=0.0, ge=0, le=0.05, description="Spread of place_short between episodes, meters."
    )
    release_early: float = Field(
        default=0.0, ge=0, le=0.2, description="Height above the surface where it lets go, meters."
    )
    habit_tasks: tuple[str, ...] = Field(default=(), description="Tasks that have the habit; empty means all.")

    @property
    def active(self) -> bool:
        return self.place_short > 0 or self.place_short_std > 0 or self.release_early > 0

    @field_validator("habit_tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_tasks(value)


class ExpertConfig(Config):
    """The scripted expert. Its actions are clean labels; whoever collects may execute them with noise."""

    speed: float = Field(default=1.0, gt=0.1, le=1, description="Largest action component in free travel.")
    habit: HabitConfig = HabitConfig()


class KnockConfig(Config):
    """Somebody knocks the block away, once, at a moment and in a direction drawn from the episode's seed.

    It slides about 6 cm at the default speed, unless the hand is in its way, and stays within reach. No demonstration
    without knocks leads to what the hand finds then. Off by default.
    """

    probability: float = Field(default=0.0, ge=0, le=1, description="Share of the episodes that have a knock.")
    speed: float = Field(
        default=3.0, gt=0, le=3.5, description="The block's speed just after it, m/s; 1 to 3 give 2 to 6 cm."
    )
    first_step: int = Field(default=4, ge=0, description="Earliest control step of the knock.")
    last_step: int = Field(default=12, ge=0, description="Latest control step; an episode may be over before.")

    @model_validator(mode="after")
    def _check_steps(self) -> KnockConfig:
        if self.first_step > self.last_step:
            raise ValueError(f"first_step {self.first_step} is after last_step {self.last_step}")
        return self


class SuccessConfig(Config):
    """What counts as done. Distances are horizontal, between centers, in meters."""

    place_radius: float = Field(default=0.045, gt=0, description="Block from the plate.")
    zone_radius: float = Field(default=0.04, gt=0, description="Pushed object from the zone.")
    stack_radius: float = Field(default=0.042, gt=0, description="Upper block from the lower block.")
    bowl_radius: float = Field(default=0.045, gt=0, description="Block from the bowl that holds it.")
    rest_speed: float = Field(default=0.05, gt=0, description="Speed below which an object is at rest, m/s.")
    hold_steps: int = Field(default=3, ge=1, description="Control steps in a row for which all must hold.")


class TabletopConfig(SimConfig):
    """The built-in tabletop: five language-conditioned tasks, one that undoes another, a floating gripper, 20 Hz."""

    known_cameras: ClassVar[tuple[str, ...]] = ("agentview", "wrist")
    shows_structure: ClassVar[bool] = True
    object_names: ClassVar[tuple[str, ...]] = ("block", "block_b", "block_c", "base", "bowl", "plate", "zone")
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
    appearance: AppearanceConfig = AppearanceConfig()
    expert: ExpertConfig = ExpertConfig()
    knock: KnockConfig = KnockConfig()
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
        moves = self.appearance.camera > 0 or (self.perturb is not None and self.perturb.axis == "camera")
        known = "agentview" in self.cameras and not moves
        return replace(
            spec, projections={"agentview": VIEW.projection()} if known else {}, suite=self.perturbation_name
        )

    def make(self, record_frames: bool = False) -> TabletopEnv:
        """One environment; loads MuJoCo. The first image rendered opens the process's GL context."""
        from sim.tabletop.env import TabletopEnv

        return TabletopEnv(self, record_frames)
