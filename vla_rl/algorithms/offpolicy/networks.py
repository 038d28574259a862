"""Critic networks, on a frozen policy's embedding of an observation and a chunk: the ensemble Q, V; edits of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import CriticNetworkConfig

Scale = tuple[np.ndarray, np.ndarray]  # Mean and spread, each (D,).
LOG_SPREAD = (-5.0, 1.0)  # Bounds of the logarithm of a squashed Gaussian's standard deviation.


class CriticNetworks(nn.Module):
    """Q's ensemble and V: two hidden layers with LayerNorm each. Inputs are normalized by the data's mean and spread.

    Args:
        place: (D,) mean and spread of what stands for the place, such as the embedding. chunk: of chunks, (H * A,).
            A number whose spread is 0 never varied: it is divided by 1, and no edit moves it.
    """

    place_mean: torch.Tensor
    place_spread: torch.Tensor
    chunk_mean: torch.Tensor
    chunk_spread: torch.Tensor

    def __init__(self, config: CriticNetworkConfig, place: Scale, chunk: Scale):
        super().__init__()
        for name, (mean, spread) in {"place": place, "chunk": chunk}.items():
            self.register_buffer(f"{name}_mean", torch.from_numpy(mean))
            self.register_buffer(f"{name}_spread", torch.from_numpy(spread))
        self.hidden = config.hidden
        self.q = nn.ModuleList(mlp(len(place[0]) + len(chunk[0]), config.hidden) for _ in range(config.members))
        self.v = mlp(len(place[0]), config.hidden)
        self.slow_v = mlp(len(place[0]), config.hidden).requires_grad_(False)
        self.slow_v.load_state_dict(self.v.state_dict())

    @classmethod
    def empty(cls, place: int, chunk: int, hidden: int, members: int) -> CriticNetworks:
        """Networks of these sizes, to load weights into."""
        config = CriticNetworkConfig(hidden=hidden, members=members)
        scales = [(np.zeros(size, np.float32), np.ones(size, np.float32)) for size in (place, chunk)]
        return cls(config, *scales)

    @property
    def facts(self) -> dict[str, Any]:
        """What `empty` needs, JSON-able."""
        sizes = {"place": len(self.place_mean), "chunk": len(self.chunk_mean)}
        return sizes | {"hidden": self.hidden, "members": len(self.q)}

    def follow(self, decay: float) -> None:
        """Bring the slow copy of V a step nearer."""
        for slow, fast in zip(self.slow_v.parameters(), self.v.parameters(), strict=True):
            slow.data.lerp_(fast.data, 1 - decay)

    def normal_place(self, place: torch.Tensor) -> torch.Tensor:
        """(..., D), normalized."""
        return (place - self.place_mean) / _divisor(self.place_spread)

    def place_of(self, features: torch.Tensor) -> torch.Tensor:
        """A policy's features (B, D), from whatever device, where these networks are, and normalized."""
        return self.normal_place(features.float().to(self.place_mean.device))

    def normal_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """(..., H * A), normalized."""
        return (chunk - self.chunk_mean) / _divisor(self.chunk_spread)

    def chunk_of(self, normal: torch.Tensor) -> torch.Tensor:
        """The inverse of `normal_chunk`."""
        return normal * _divisor(self.chunk_spread) + self.chunk_mean

    @property
    def chunk_varies(self) -> torch.Tensor:
        """Which numbers of a chunk differ among the data's chunks, float32 (H * A,): 1, or 0."""
        return (self.chunk_spread > 0).float()

    def q_logits(self, place: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """Of each network, (members, ...), from normalized inputs."""
        return q_logits(self.q, place, chunk)

    def q_values(self, place: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """Q by each network, (members, B, N), of N normalized chunks (B, N, H * A) at each place (B, D)."""
        where = place[:, None].expand(-1, chunk.shape[1], -1)
        return self.q_logits(where, chunk).sigmoid()

    def smallest(self, place: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        """The smallest Q of the ensemble, (B, N); arguments as for `q_values`."""
        return self.q_values(place, chunk).min(0).values


def _divisor(spread: torch.Tensor) -> torch.Tensor:
    """What normalizing divides by: 1 where the data never vary."""
    return torch.where(spread > 0, spread, torch.ones_like(spread))


def q_logits(networks: nn.ModuleList, place: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """Of each network, (members, ...), from normalized inputs."""
    both = torch.cat([place, chunk], -1)
    return torch.stack([network(both)[..., 0] for network in networks])


def squashed(outputs: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """tanh(u), u Gaussian, (..., K), of a network's outputs (..., 2 K), and its log-density (...).

    Args:
        noise: standard Gaussian (..., K); None: none, so that the result is the likeliest u's.
    """
    mean, log_spread = outputs.chunk(2, -1)
    log_spread = LOG_SPREAD[0] + (LOG_SPREAD[1] - LOG_SPREAD[0]) * log_spread.sigmoid()
    noise = torch.zeros_like(mean) if noise is None else noise
    u = mean + log_spread.exp() * noise
    log_density = -0.5 * noise.square() - log_spread - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2)
    return u.tanh(), (log_density - squash).sum(-1)


def mlp(inputs: int, hidden: int, outputs: int = 1) -> nn.Sequential:
    """Two hidden layers, each with LayerNorm."""

    def layer(size: int) -> list[nn.Module]:
        return [nn.Linear(size, hidden), nn.LayerNorm(hidden), nn.GELU()]

    return nn.Sequential(*layer(inputs), *layer(hidden), nn.Linear(hidden, outputs))


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
