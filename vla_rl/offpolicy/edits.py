"""A small policy that changes another policy's chunks within bounds (EXPO, arXiv 2507.07986)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vla_rl.offpolicy.networks import mlp, squashed


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
        change, log_density = squashed(self.network(torch.cat([place, chunk], -1)), noise)
        return chunk + self.scale * change, log_density
