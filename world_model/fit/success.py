"""Loss of the success networks: real frames, and frames imagined from the same actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vla_rl.training.trainer import Loss
from world_model.data.clips import ClipDataset, SuccessBatch, SuccessSamples
from world_model.fit.config import FitConfig
from world_model.fit.replay import ImaginedSamples
from world_model.interfaces import SuccessHead


def success_loss(
    network: SuccessHead,
    clips: ClipDataset,
    imagined: ImaginedSamples | None,
    config: FitConfig,
    seed: int,
    number: int,
    device: torch.device,
) -> Loss:
    """What a step of the stage learns from.

    Args:
        number: of the network, so that each draws samples of its own.
    """
    stage = config.success
    num_imagined = round(stage.batch_size * config.imagined_share) if imagined is not None else 0
    real = SuccessSamples(clips, network.num_frames)

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(np.random.SeedSequence([seed, number, step]).generate_state(1)[0])  # Dropout.
        parts = []
        if num_imagined < stage.batch_size:
            parts.append(real.batch(stage.batch_size - num_imagined, seed + number, step))
        if imagined is not None and num_imagined:
            parts.append(imagined.batch(num_imagined, network.num_frames, seed + number, step))
        batch = SuccessBatch.concatenate(parts).to(device)
        return network.loss(batch.frames, batch.reference, batch.instruction, batch.success)

    return loss
