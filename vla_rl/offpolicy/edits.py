"""A small policy that changes another policy's chunks within bounds (EXPO, arXiv 2507.07986)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vla_rl.offpolicy.networks import mlp

LOG_SPREAD = (-5.0, 1.0)  # Bounds of the logarithm of its Gaussian's standard deviation.


class EditPolicy(nn.Module):
    """chunk + scale * tanh(u), u Gaussian, its mean and spread from the place and the chunk. All inputs normalized.

    Args:
        place, chunk: sizes D and H * A. scale: largest change of a number of the chunk, in the data's spreads of it.
    """

    def __init__(self, place: int, chunk: int, hidden: int, scale: float):
        super().__init__()
        self.scale = scale
        self.network = mlp(place + chunk, hidden, 2 * chunk)
        last = self.network[-1]
        assert isinstance(last, nn.Linear), "mlp ends in a linear layer"
        nn.init.zeros_(last.weight)  # At first the changes are small noise around none.
        nn.init.constant_(last.bias[:chunk], 0.0)
        nn.init.constant_(last.bias[chunk:], -1.0)
        self.facts: dict[str, Any] = {"place": place, "chunk": chunk, "hidden": hidden, "scale": scale}

    def forward(
        self, place: torch.Tensor, chunk: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change chunks, (..., H * A), at places (..., D).

        Args:
            noise: standard Gaussian, as the chunks; None: none, so that the change is the likeliest.

        Returns:
            The changed chunks, and the log-density (...) of each tanh(u).
        """
        mean, log_spread = self.network(torch.cat([place, chunk], -1)).chunk(2, -1)
        log_spread = LOG_SPREAD[0] + (LOG_SPREAD[1] - LOG_SPREAD[0]) * log_spread.sigmoid()
        noise = torch.zeros_like(mean) if noise is None else noise
        u = mean + log_spread.exp() * noise
        log_density = -0.5 * noise.square() - log_spread - 0.5 * math.log(2 * math.pi)
        squash = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2)
        return chunk + self.scale * u.tanh(), (log_density - squash).sum(-1)
