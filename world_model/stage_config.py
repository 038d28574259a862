"""Options of the fit stages."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.config import Config
from vla_rl.training.config import AveragedConfig, OptimConfig, TrainerConfig
from world_model.config import ObjectsConfig


class FitStage(TrainerConfig):
    """A stage of a known length, whose learning rate falls to a twentieth."""

    max_bad_steps: ClassVar[int] = 20

    steps: NonNegativeInt = Field(default=1000, description="Updates; 0 leaves the part as it is.")
    batch_size: PositiveInt = Field(default=32, description="Images (autoencoder) or clips per update.")
    optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=50)

    @property
    def last_lr_share(self) -> float:
        return 0.05


class StageConfig(FitStage, AveragedConfig):
    """How one part is fitted."""


class ObjectsStageConfig(FitStage):
    """How the objects part is fitted, on episodes recorded with collect.objects."""

    steps: NonNegativeInt = Field(default=0, description="Updates; 0 leaves the part as it is, or out.")
    batch_size: PositiveInt = Field(
        default=96, description="Episodes per update; the probe sees half as many single frames."
    )
    optim: OptimConfig = OptimConfig(lr=2e-3, warmup_steps=100)
    network: ObjectsConfig | None = Field(default=None, description="What it is made of; null: as it is in start_from.")
    mirror: bool = Field(
        default=False,
        description="Half of the episodes are seen in a mirror at the plane y = 0; only where the robot is symmetrical "
        "about it, and no instruction says left or right.",
    )


class StyleConfig(Config):
    """Training clips in other styles, guided by segmentation (see docs/style_robust.md)."""

    share: float = Field(
        default=0.0, ge=0, lt=1, description="Of the images and clips that are in another style; 0: none."
    )
    copies: PositiveInt = Field(
        default=2, le=64, description="Styles of each episode that clips are drawn from; latents of each are kept."
    )

    depth: bool = Field(
        default=False, description="Also light from another side, for which the datasets must have recorded depth."
    )
    still_cameras: tuple[str, ...] | None = Field(
        default=None,
        description="Cameras that do not move; only these get patterns and uneven light. null: those whose projection "
        "the environment knows.",
    )
