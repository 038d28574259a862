"""`vla-rl sft`: behavior cloning of a recipe's policy on its datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rl.common.run_folder import RunFolder
from vla_rl.distributed.process_group import current
from vla_rl.recipe.checks import SFT, Run, check, demonstrations_of
from vla_rl.recipe.recipe import Recipe
from vla_rl.training.bc_loop import train_bc
from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint
from vla_rl.training.metrics import MetricLogger, SilentLogger
from vla_rl.workflows.recipe_parts import build_policy, env_spec


def clone(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Behavior cloning of the recipe's policy on its datasets; resumes at the folder's last checkpoint.

    Raises:
        ConfigError: the recipe has no sft section.
        DatasetError: a dataset is not there.
    """
    check(recipe, SFT)
    spec = env_spec(recipe)
    with current().reading_parts():
        policy = build_policy(recipe, spec)
    run = RunFolder(folder)
    checkpoint = latest_checkpoint(run.checkpoints)
    done = checkpoint_step(checkpoint) if checkpoint else 0 if run.metrics.exists() else None
    run_config = recipe.model_dump(mode="json")
    if current().is_main:
        logger = MetricLogger(folder, recipe.log, resume_step=done, run_config=run_config)
    else:
        logger = SilentLogger()
    with logger:
        return train_bc(policy, demonstrations_of(recipe), folder, logger.log, recipe.seed, env_spec=spec)


def _start(recipe: Recipe, folder: Path, _: bool, __: Callable[[str], None]) -> list[str]:
    summary = clone(recipe, folder)
    loss = f", loss {summary['loss']:.4f}" if "loss" in summary else ""
    return [f"policy: {summary['policy']}  ({summary['steps']} steps{loss})"]


RUN = Run("sft", SFT, _start, datasets=lambda _: ("sft.datasets",), free=("sft.steps",))
