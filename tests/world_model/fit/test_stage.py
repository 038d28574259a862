"""One part's training: its checkpoints and its option names, those of earlier versions too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vla_rl.training.checkpoint import save_checkpoint
from vla_rl.training.trainer import Trainer
from world_model.config import StageConfig
from world_model.fit.stage import resume_stage, stage_trainer


def make(options: dict[str, Any]) -> tuple[nn.Module, Trainer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    stage = StageConfig.model_validate({"steps": 30, **options}).with_optim(warmup_steps=5)
    return module, stage_trainer(module, stage, "dynamics", low_precision=True)


def train(module: nn.Module, trainer: Trainer, steps: int) -> None:
    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        return (module(x)[:, 0] - x.sum(1)).float().square().mean(), {}

    for _ in range(steps):
        trainer.step(loss)


@pytest.mark.parametrize("options", [{"optim": {"name": "muon"}}, {"ema_decay": 0.9}])
def test_a_stage_resumes_to_the_bit(options: dict[str, Any], tmp_path: Path) -> None:
    whole, trainer = make(options)
    train(whole, trainer, 30)
    first, trainer = make(options)
    train(first, trainer, 12)
    tensors, state = trainer.state()
    save_checkpoint(tmp_path / "step_00000012", tensors, json.loads(json.dumps(state)))
    second, trainer = make(options)
    resume_stage(trainer, tmp_path / "step_00000012")
    assert trainer.num_steps == 12
    train(second, trainer, 18)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
