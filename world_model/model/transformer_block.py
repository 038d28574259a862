"""Block of the factorized video transformer, with its noise-level modulation, and what it remembers of frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from world_model.types import Frames

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


@dataclass(frozen=True)
class Remembered:
    """What is remembered of one more frame: keys, values float (B, depth, N, heads, D), and the frame itself, B x 1."""

    keys: torch.Tensor
    values: torch.Tensor
    latest: Frames


@dataclass(frozen=True)
class VideoContext:
    """Keys and values of B episodes' remembered frames, W = 1 + memory slots: the reference, then the last ones
    in turn (a ring; their order is in the keys' rotation). The context owns them: they are written in place.

    Attributes:
        keys, values: float (B, depth, W, N, heads, D).
        filled: bool (B, W).
        num_frames: int64 (B,), frames seen; the number of the next one.
        latest: B x 1 frames, the last one remembered, as it was remembered (with its noise).
    """

    keys: torch.Tensor
    values: torch.Tensor
    filled: torch.Tensor
    num_frames: torch.Tensor
    latest: Frames

    def select(self, rows: torch.Tensor) -> VideoContext:
        """See `Context.select`."""
        return VideoContext(
            self.keys[rows],
            self.values[rows],
            self.filled[rows],
            self.num_frames[rows],
            self.latest.select(rows),
        )

    def copy(self) -> VideoContext:
        """One of its own."""
        return self.select(torch.arange(len(self.keys), device=self.keys.device))

    def put(self, rows: torch.Tensor, other: VideoContext) -> VideoContext:
        """See `Context.put`."""
        latest, new = self.latest, other.latest
        return VideoContext(
            self.keys.index_copy_(0, rows, other.keys),
            self.values.index_copy_(0, rows, other.values),
            self.filled.index_copy(0, rows, other.filled),
            self.num_frames.index_copy(0, rows, other.num_frames),
            Frames(
                latest.latents.index_copy(0, rows, new.latents),
                latest.states.index_copy(0, rows, new.states),
            ),
        )

    def with_frame(self, new: Remembered) -> VideoContext:
        """With one more frame, whose keys and values take the oldest one's place."""
        place = self.next_place()
        self.write(new, place)
        return self.counting(new, place)

    def write(self, new: Remembered, place: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values at each episode's row and slot."""
        row, slot = place
        self.keys[row, :, slot] = new.keys
        self.values[row, :, slot] = new.values

    def counting(self, new: Remembered, place: tuple[torch.Tensor, torch.Tensor]) -> VideoContext:
        """What else changes with a frame that is written."""
        filled = self.filled.clone()
        filled[place] = True
        return VideoContext(self.keys, self.values, filled, self.num_frames + 1, new.latest)

    def next_place(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each episode's row and the slot of its next frame, int64 (B,) both."""
        memory, number = self.filled.shape[1] - 1, self.num_frames
        slot = torch.where(number == 0, 0, 1 + (number - 1) % memory)
        return torch.arange(len(slot), device=slot.device), slot

    def tensors(self) -> dict[str, torch.Tensor]:
        """For a keyframe."""
        return {
            "keys": self.keys,
            "values": self.values,
            "filled": self.filled,
            "num_frames": self.num_frames,
            "latents": self.latest.latents,
            "states": self.latest.states,
        }

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> VideoContext:
        """What `tensors` gave."""
        latest = Frames(tensors["latents"], tensors["states"])
        return VideoContext(tensors["keys"], tensors["values"], tensors["filled"], tensors["num_frames"], latest)
