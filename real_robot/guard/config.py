"""The guard section of a robot's contract."""

from __future__ import annotations

from pydantic import Field

from real_robot.finite_config import FiniteConfig


class GuardConfig(FiniteConfig):
    """How `vla-rl robot-guard` and a guarded deploy find each other, and when the guard brakes."""

    required: bool = Field(default=False, description="Deploy always drives through the guard, as with --guarded.")
    suffix: str = Field(
        default="/guarded",
        pattern=r"^[A-Za-z0-9_/]+$",
        description="Appended to each action topic, for the commands to the guard.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds: the guard brakes when the newest command is older; null: four control ticks.",
    )
