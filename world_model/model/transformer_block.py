"""Block of the factorized video transformer, with its noise-level modulation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

NUM_MODULATIONS = 9  # shift, scale and gate for each of a block's three parts


class TransformerBlock(nn.Module):
    """Attention within the frame, along time, MLP; (B, T, N, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.spatial, self.spatial_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.temporal, self.temporal_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.offset = nn.Parameter(torch.zeros(NUM_MODULATIONS, width))
        with torch.no_grad():
            self.offset[2::3] = 1.0  # gates open

    def forward(
        self, x: torch.Tensor, modulation: torch.Tensor, number: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """`number` int64 (B, T) of each frame in its episode; `seen` bool (B, T, T): query sees key."""
        m = self._modulators(modulation)
        x = self._within_frame(x, m)
        query, key, value = self._temporal(x, m, number)
        x = x + m[5] * self.temporal_out(_attend_in_time(query, key, value, seen))
        return self._mlp(x, m)

    def step(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        number: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One frame (T = 1) over past keys, values (B, W, N, heads, D) where filled (B, W); also gives its own."""
        m = self._modulators(modulation)
        x = self._within_frame(x, m)
        query, key, value = self._temporal(x, m, number)
        keys, values = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        seen = torch.cat([past[2], torch.ones_like(past[2][:, :1])], 1)[:, None]
        x = x + m[5] * self.temporal_out(_attend_in_time(query, keys, values, seen))
        return self._mlp(x, m), key[:, 0], value[:, 0]

    def _modulators(self, modulation: torch.Tensor) -> list[torch.Tensor]:
        return list((modulation + self.offset)[:, :, :, None].unbind(2))

    def _within_frame(self, x: torch.Tensor, m: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = self._heads(self.spatial(self.norm(x) * (1 + m[1]) + m[0]))
        query, key, value = (part.transpose(2, 3) for part in (query, key, value))  # (B, T, heads, N, D)
        weights = (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1)
        return x + m[2] * self.spatial_out((weights @ value).transpose(2, 3).flatten(3))

    def _temporal(
        self, x: torch.Tensor, m: list[torch.Tensor], number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self._heads(self.temporal(self.norm(x) * (1 + m[4]) + m[3]))
        cosine, sine = _rotation(number, query.shape[-1])
        return _rotated(query, cosine, sine), _rotated(key, cosine, sine), value

    def _mlp(self, x: torch.Tensor, m: list[torch.Tensor]) -> torch.Tensor:
        return x + m[8] * self.mlp_out(F.relu(self.mlp_in(self.norm(x) * (1 + m[7]) + m[6])).square())

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.unflatten(x, -1, (3, self.heads, -1)).unbind(-3)  # A method would break compiled graphs.


def _attend_in_time(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention at each token's own place: query (B, Tq, N, heads, D), key, value (B, Tk, ...); seen (B, Tq, Tk)."""
    query, key, value = (part.permute(0, 2, 3, 1, 4) for part in (query, key, value))  # (B, N, heads, T, D)
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights @ value).permute(0, 3, 1, 2, 4).flatten(3)


def level_features(levels: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of a noise level, (B, T) -> (B, T, 64)."""
    frequency = torch.exp(torch.linspace(0, 6, 32, device=levels.device))
    angle = levels[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


def _rotation(number: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position of frame numbers: cosine and sine (B, T, 1, 1, D / 2)."""
    frequency = 100.0 ** -(torch.arange(dim // 2, device=number.device) / (dim // 2))
    angle = (number[..., None] * frequency)[:, :, None, None]
    return angle.cos(), angle.sin()


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)
