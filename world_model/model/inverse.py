"""Inverse dynamics: the action between two frames, from their latents.

Learned from real frames, it tells of imagined ones whether their motion is the motion that the actions ask for (as EVA,
arXiv 2603.17808, and RLIR, arXiv 2509.23958, use such networks). It sees no proprioception, from which the action would
follow without looking at the images.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from world_model.types import Actions

MAX_SIDE = 16  # Latents are pooled to at most this side: where things are matters, fine texture does not.


class InverseDynamics(nn.Module):
    """Reads the mean action between two frames off their latents; a small convolutional network.

    Args:
        latent_shape: (C, h, w) of one of the V views. action_dim: A.

    Attributes:
        mean, std: float32 (A,), of the actions that it learns from; see `learn_scale`.
        varies: bool (A,), dimensions that move at all; those that never do would count as read.
    """

    mean: torch.Tensor
    std: torch.Tensor
    varies: torch.Tensor

    def __init__(self, latent_shape: tuple[int, int, int], num_views: int, action_dim: int) -> None:
        super().__init__()
        channels, height, width = latent_shape
        cells = -(-min(height, MAX_SIDE) // 2) * -(-min(width, MAX_SIDE) // 2)
        self.network = nn.Sequential(
            nn.Conv2d(2 * num_views * channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * cells, 128),
            nn.ReLU(),
            nn.Linear(128, action_dim),
        )
        self.register_buffer("mean", torch.zeros(action_dim))
        self.register_buffer("std", torch.ones(action_dim))
        self.register_buffer("varies", torch.ones(action_dim, dtype=torch.bool))

    def learn_scale(self, actions: torch.Tensor) -> None:
        """Take the mean and the spread of mean actions, float32 (N, A)."""
        std = actions.std(0)
        self.mean.copy_(actions.mean(0))
        self.std.copy_(std.clamp(min=1e-6))
        self.varies.copy_(std > 1e-4)

    def loss(self, before: torch.Tensor, after: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Mean squared error, in variances, of the mean actions (N, A) between latents (N, V, C, h, w).

        Of dimensions that do not vary the mean is asked, whatever they are: what is rare has no scale.
        """
        wanted = ((actions - self.mean) / self.std).where(self.varies, 0.0)
        return F.mse_loss(self.network(features(before, after)), wanted)

    @torch.no_grad()
    def errors(self, latents: torch.Tensor, actions: Actions) -> torch.Tensor:
        """Mean squared error of the actions read off each pair of frames, in variances of the action.

        1 is what guessing the mean action gives.

        Args:
            latents: float32 (B, F + 1, V, C, h, w), frames one after another. actions: B x F, those that led from each
                to the next.

        Returns:
            float32 (B, F); NaN where nothing was executed.
        """
        shape = actions.executed.shape[:2]
        guess = self.network(features(latents[:, :-1].flatten(0, 1), latents[:, 1:].flatten(0, 1))).unflatten(0, shape)
        off = (guess - (mean_actions(actions, len(self.mean)) - self.mean) / self.std).where(self.varies, 0.0)
        error = off.square().sum(-1) / self.varies.sum()  # Not `[self.varies]`, which the host would wait for.
        return torch.where(actions.executed.any(-1), error, torch.nan)


def features(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """(N, V, C, h, w) twice -> (N, 2 V C, h', w'): the earlier frame and what changed."""
    both = torch.cat([before, after - before], 1).flatten(1, 2)
    height, width = both.shape[-2:]
    return F.adaptive_avg_pool2d(both, (min(height, MAX_SIDE), min(width, MAX_SIDE)))


def mean_actions(actions: Actions, size: int | None = None) -> torch.Tensor:
    """B x F -> float32 (B, F, A), the mean over the executed control steps; zeros where there is none.

    Args:
        size: A, where what the body moves follows an action's numbers and is to be left out; None: all numbers.
    """
    executed = actions.executed
    return (actions.values[..., :size] * executed[..., None]).sum(-2) / executed.sum(-1, keepdim=True).clamp(min=1)
