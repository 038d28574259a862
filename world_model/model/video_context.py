"""Context of the video transformer: keys and values of remembered frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from world_model.types import Frames


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
