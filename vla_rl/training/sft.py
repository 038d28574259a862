"""Behavior cloning: its options, and the entry point. The loop itself is in `bc_loop.py`.

train_bc(policy, SFTConfig(datasets=["data/demos"], steps=2000), folder, log, seed=0)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.data.config import AugmentConfig, Datasets
from vla_rl.training.config import OptimConfig, TrainerConfig

if TYPE_CHECKING:
    from vla_rl.data.dataset import BCDataset
    from vla_rl.interfaces import Policy
    from vla_rl.training.bc_trainer import BCTrainer
    from vla_rl.types import EnvSpec


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


def train_bc(
    policy: Policy,
    config: SFTConfig,
    run_folder: Path,
    log: Callable[[int, dict[str, Any]], None],
    seed: int = 0,
    *,
    env_spec: EnvSpec | None = None,
    progress: bool = True,
    choose: Callable[[BCDataset], BCDataset] | None = None,
    trainer: type[BCTrainer] | None = None,
) -> dict[str, Any]:
    """Train a policy by behavior cloning; continue from the last whole checkpoint in the folder.

    Writes `run_folder/checkpoints/step_*` while it trains and `run_folder/policy` at the end. On a CPU the losses
    of a resumed run equal those of an uninterrupted one to the bit.

    Args:
        policy: trained in place. Its normalization statistics are set from the data unless it has some.
        log: called with (step, metrics) every `config.log_every` steps.
        env_spec: the environment's facts; datasets must have its control rate and state size. None: not checked.
        progress: show a progress bar.
        choose: which examples of the config's datasets count, and how often; None: all alike.
        trainer: what makes an update of them; None: cloning.

    Returns:
        policy (folder), steps, samples_per_second, num_bad_steps, episodes, frames, and the last logged metrics.

    Raises:
        DatasetError: a dataset that is missing, damaged or does not fit.
        TrainingDivergedError: `max_bad_steps` in a row; the last good state is kept as a checkpoint.
    """
    from vla_rl.training.bc_loop import BCTrainer, run_training

    return run_training(
        policy,
        config,
        Path(run_folder),
        log,
        seed,
        env_spec=env_spec,
        progress=progress,
        choose=choose,
        trainer=trainer or BCTrainer,
    )
