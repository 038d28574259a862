"""Context of the video transformer: keys and values of remembered frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from world_model.types import Frames


@dataclass(frozen=True)
class VideoContext:
    """Keys and values of B episodes' remembered frames, W = 1 + memory slots: the reference, then the last ones
    in turn (a ring; their order is in the keys' rotation).

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
        """Of the episodes at `rows`, int64, in that order."""
        return VideoContext(
            self.keys[rows],
            self.values[rows],
            self.filled[rows],
            self.num_frames[rows],
            self.latest.select(rows),
        )

    def put(self, rows: torch.Tensor, other: VideoContext) -> VideoContext:
        """With the episodes at `rows` replaced by those of `other`."""

        def replaced(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            result = old.clone()
            result[rows] = new
            return result

        return VideoContext(
            replaced(self.keys, other.keys),
            replaced(self.values, other.values),
            replaced(self.filled, other.filled),
            replaced(self.num_frames, other.num_frames),
            Frames(
                replaced(self.latest.latents, other.latest.latents), replaced(self.latest.states, other.latest.states)
            ),
        )

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


def written(old: torch.Tensor, new: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """`old` (B, depth, W, ...) with `new` (B, depth, ...) in each row's slot."""
    result = old.clone()
    result[row, :, slot] = new
    return result
