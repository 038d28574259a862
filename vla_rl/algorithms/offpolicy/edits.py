"""Edit policy: bounded changes of another policy's chunks (EXPO, arXiv 2507.07986)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vla_rl.algorithms.offpolicy.networks import CriticNetworks, mlp, squashed


class EditPolicy(nn.Module):
    """chunk + scale * tanh(u), u Gaussian, its mean and spread from the place and the chunk. All inputs normalized.

    A number that never varies in the critic's data is not changed: what it does there nobody has tried.

    Args:
        place, chunk: sizes D and H * A. scale: largest change of a number of the chunk, in the data's spreads of it.
        low, high: bounds of an action, A numbers each in the environment's units, to which changed chunks are
            clipped; None: they are not.
    """

    def __init__(
        self,
        place: int,
        chunk: int,
        hidden: int,
        scale: float,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
    ):
        super().__init__()
        self.scale, self.low, self.high = scale, low, high
        self.network = mlp(place + chunk, hidden, 2 * chunk)
        last = self.network[-1]
        assert isinstance(last, nn.Linear), "mlp ends in a linear layer"
        nn.init.zeros_(last.weight)  # At first the changes are small noise around none.
        nn.init.constant_(last.bias[:chunk], 0.0)
        nn.init.constant_(last.bias[chunk:], -1.0)
        self.facts: dict[str, Any] = {"place": place, "chunk": chunk, "hidden": hidden, "scale": scale}
        self.facts |= {"low": low, "high": high}

    def forward(
        self, critic: CriticNetworks, place: torch.Tensor, chunk: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Change chunks, (..., H * A), at places (..., D).

        Args:
            critic: whose data the inputs are normalized by.
            noise: standard Gaussian, as the chunks; None: none, so that the change is the likeliest.

        Returns:
            The changed chunks, and the log-density (...) of each tanh(u).
        """
        change, log_density = squashed(self.network(torch.cat([place, chunk], -1)), noise)
        edited = chunk + self.scale * critic.chunk_varies * change
        if self.low is None or self.high is None:
            return edited, log_density
        steps = chunk.shape[-1] // len(self.low)
        low, high = (critic.normal_chunk(chunk.new_tensor(bound).repeat(steps)) for bound in (self.low, self.high))
        return edited.clamp(low, high), log_density
