"""Networks of a world model, and fresh ones of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from world_model.config import WorldModelConfig
from world_model.interfaces import Autoencoder, Dynamics, SuccessHead
from world_model.metadata import WorldModelMetadata
from world_model.model.autoencoder import build_autoencoder
from world_model.model.inverse import InverseDynamics
from world_model.model.objects import ObjectModel
from world_model.model.success import ClipSuccessClassifier, LatentSuccessHead
from world_model.types import DynamicsInputs


@dataclass(frozen=True)
class Parts:
    """The four networks, and the value head, the objects part and the inverse dynamics where they were fitted."""

    autoencoder: Autoencoder
    dynamics: Dynamics
    success: SuccessHead
    clip: SuccessHead
    value_head: SuccessHead | None = None
    objects: ObjectModel | None = None
    inverse: InverseDynamics | None = None


BuildParts = Callable[[WorldModelConfig, WorldModelMetadata], Parts]


def build_parts(config: WorldModelConfig, metadata: WorldModelMetadata) -> Parts:
    """Fresh networks of a config, for the robot and the cameras that the metadata name; seed torch before.

    Raises:
        ValueError: sizes that do not fit each other, or an autoencoder folder that cannot be read.
    """
    autoencoder = build_autoencoder(config.autoencoder, metadata.image_size)
    shape, num_views = autoencoder.latent_shape, len(metadata.cameras)
    mean, std = (np.array(values, np.float32) for values in (metadata.state_mean, metadata.state_std))
    sizes = (metadata.state_dim, metadata.action_dim, config.frame_steps)
    dynamics = config.dynamics.build(DynamicsInputs(shape, metadata.cameras, *sizes, mean, std))
    success = LatentSuccessHead(config.success, shape, num_views, metadata.state_dim)
    return Parts(autoencoder, dynamics, success, ClipSuccessClassifier(config.success, shape, num_views))


class Posterior(nn.Module):
    """K adapters, which at first change nothing.

    Args:
        members: K. rank: of an adapter.
        width: of the features that modulation is computed from, and of each of its parts.
        depth: blocks. parts: of a block's modulation.
    """

    def __init__(self, members: int, rank: int, width: int, depth: int, parts: int) -> None:
        super().__init__()
        self.members, self.rank, self.shape = members, rank, (depth, parts, width)
        rows = members * rank
        self.down = nn.Parameter(torch.randn(rows, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, depth * parts * width))

    def forward(self, features: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
        """What the members at `member`, int64 (B,), add to each block's modulation: (B, T, depth, parts, width).

        All members' first halves are computed, and those of others set to zero: no weights are gathered row by row.

        Args:
            features: float (B, T, width).
        """
        numbers = torch.arange(self.members, device=member.device).repeat_interleave(self.rank)
        own = (member[:, None] == numbers).to(features.dtype)
        return ((features @ self.down.T * own[:, None]) @ self.up).unflatten(-1, self.shape)
