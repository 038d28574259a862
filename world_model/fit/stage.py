"""Fit stage: the training of one part, from its checkpoint on, and where its weights are kept."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint
from vla_rl.training.trainer import Trainer
from world_model.config import FitStage
from world_model.fit.config import FitConfig

WEIGHTS = "weights.safetensors"


def finished_weights(folder: Path, name: str) -> Path:
    """A stage's weights in a fit's folder, there once it is finished."""
    return folder / "stages" / name / WEIGHTS


def stage_checkpoints(folder: Path, name: str) -> Path:
    """Those of a stage under way."""
    return folder / "checkpoints" / name


def stage_trainer(network: nn.Module, stage: FitStage, name: str, low_precision: bool = False) -> Trainer:
    """Return the trainer of a part, which steps on float32 copies of its weights.

    Args:
        name: of the stage's section in `world_model`.
        low_precision: compute in bfloat16.
    """
    dtype = torch.bfloat16 if low_precision else None
    parameters = dict(network.train().named_parameters())
    return Trainer(parameters, stage, f"world_model.{name}", keep_masters=True, compute_dtype=dtype)


def resume_stage(trainer: Trainer, checkpoint: Path) -> None:
    """Load what `Trainer.state` gave.

    Raises:
        CheckpointError: not whole, or of another optimizer.
    """
    tensors, state = load_checkpoint(checkpoint)
    trainer.load_state(tensors, state)


def updates_kept(config: FitConfig, folder: Path) -> int:
    """Updates, over all stages, that `fit` would not make again in this folder."""
    stages = {"autoencoder": config.autoencoder, "dynamics": config.dynamics}
    stages |= {"success": config.success, "clip": config.success, "value": config.value}
    stages |= {"objects": config.objects, "inverse": config.inverse}
    updates = 0
    for name, stage in stages.items():
        if stage.steps and not finished_weights(folder, name).is_file():
            checkpoint = latest_checkpoint(stage_checkpoints(folder, name))
            return updates + (checkpoint_step(checkpoint) if checkpoint else 0)
        updates += stage.steps
    return updates
