"""What the host needs of an imagined chunk, read in one transfer: the host waits for the device once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from world_model.config import ImaginationConfig
from world_model.imagination.chunk import ImaginedChunk
from world_model.imagination.reward import probability, worth
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel


@dataclass(frozen=True)
class Seen:
    """A chunk of B episodes on the host.

    Attributes:
        worth: (B, F), see `reward.worth`.
        finite: bool (B,), nothing of it is NaN or infinite.
        discarded, disagreement: (B,), see `ImaginedChunk`.
        states: float32 (B, F, S), the robot's units.
        images: uint8 (B, F, V, height, width, 3); None where one frame of several will be asked for.
        action_error: float32 (B, F), see `WorldModel.action_errors`; None where nothing is taken off for it.
        probability: float32 (B, F), of success, where it is known and `worth` is a verdict.
    """

    worth: np.ndarray
    finite: np.ndarray
    discarded: np.ndarray
    disagreement: np.ndarray
    states: np.ndarray
    images: np.ndarray | None = None
    action_error: np.ndarray | None = None
    probability: np.ndarray | None = None

    def select(self, rows: Sequence[int]) -> Seen:
        """Of the episodes at `rows`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})


@torch.no_grad()
def read_chunk(
    world_model: WorldModel,
    memory: Memory,
    chunk: ImaginedChunk,
    config: ImaginationConfig,
    every_image: bool = False,
) -> Seen:
    """Bring a chunk to the host; with a single frame, or `every_image`, its pictures come along."""
    every_image = every_image or chunk.frames.states.shape[1] == 1
    wanted = to_show(world_model, memory, chunk, config, every_image)
    return Seen(**dict(zip(wanted, download(*wanted.values()), strict=True)))


@torch.no_grad()
def to_show(
    world_model: WorldModel, memory: Memory, chunk: ImaginedChunk, config: ImaginationConfig, images: bool
) -> dict[str, torch.Tensor]:
    """What `Seen` has of the chunk that follows `memory`, on the device."""
    frames = chunk.frames
    wanted = {
        "worth": worth(world_model, chunk, config),
        "finite": frames.latents.isfinite().flatten(1).all(1) & frames.states.isfinite().flatten(1).all(1),
        "discarded": chunk.discarded,
        "disagreement": chunk.disagreement,
        "states": world_model.raw_states(frames),
    }
    if images:
        wanted["images"] = world_model.decoded(frames)
    if config.action_penalty:
        wanted["action_error"] = world_model.action_errors(memory, frames, chunk.actions)
    if config.reward == "success" and world_model.metadata.success_probability is not None:
        wanted["probability"] = probability(world_model, chunk, config)
    return wanted


def download(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copy tensors of any types from the device in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    return unpacked(packed(*tensors), [(tensor.dtype, tensor.shape) for tensor in tensors])


def packed(*tensors: torch.Tensor) -> torch.Tensor:
    """The bytes of tensors of any types, one after the other."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpacked(data: torch.Tensor, layout: Sequence[tuple[torch.dtype, torch.Size]]) -> list[np.ndarray]:
    """The tensors that were `packed`, of these types and shapes, on the host."""
    host = data.cpu().split([shape.numel() * dtype.itemsize for dtype, shape in layout])
    # Cloned, so that each begins where its type may begin.
    return [part.clone().view(dtype).view(shape).numpy() for part, (dtype, shape) in zip(host, layout, strict=True)]
