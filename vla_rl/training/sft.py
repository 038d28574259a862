"""Options of behavior cloning. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.data.config import AugmentConfig, Datasets
from vla_rl.training.config import OptimConfig, TrainerConfig

if TYPE_CHECKING:
    pass


class SFTConfig(TrainerConfig):
    """Behavior cloning of a policy on demonstrations."""

    optim: OptimConfig = Field(default=OptimConfig(warmup_steps=100), description="Warms up in `steps` at most.")
    datasets: Datasets = Field(
        description="LeRobotDataset v3 folders: a path, or a list of paths or of {path, weight, ...}."
    )
    image_size: PositiveInt | None = Field(
        default=None, description="Resize images to this side; empty keeps the dataset's."
    )
    cache_folder: str | None = Field(
        default=None, description="Where decoded images go; empty: `.cache` inside each dataset."
    )
    action_scale: Literal["quantiles", "environment"] = Field(
        default="quantiles",
        description="Which actions the outermost bins stand for, in a fresh policy: the data's 1 % and 99 % quantiles "
        "(OpenVLA), or -1 and 1 of the environment, which keeps dimensions that hardly move from filling all bins.",
    )
    steps: PositiveInt = Field(default=2000, description="Optimizer updates.")
    grad_accumulation: PositiveInt = Field(default=1, description="Parts into which a batch is cut to save memory.")
    final_lr_fraction: float = Field(
        default=0.1, ge=0, le=1, description="Share of lr that a cosine decay after the warm-up ends at; 1: no decay."
    )
    precision: Literal["policy", "bf16"] = Field(
        default="policy", description="accelerate's mixed precision; policy: none, the policy's own precision holds."
    )
    augment: AugmentConfig = Field(default_factory=AugmentConfig, description="Of the training images.")
    validation_fraction: float = Field(default=0.0, ge=0, lt=1, description="Share of episodes held out for a loss.")
    log_every: PositiveInt = Field(default=20, description="Steps between logged (averaged) metrics.")
    save_every: PositiveInt = Field(default=500, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(default=2, description="Checkpoints kept.")
    num_threads: NonNegativeInt = Field(default=0, description="torch threads on a CPU; 0 leaves them as they are.")
