"""What the host needs of an imagined chunk, read in one transfer: the host waits for the device once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from world_model.config import ImaginationConfig
from world_model.imagination.chunk import ImaginedChunk
from world_model.imagination.reward import probability, worth
from world_model.model.world_model import WorldModel


@dataclass(frozen=True)
class Seen:
    """A chunk of B episodes on the host.

    Attributes:
        worth: (B, F), see `reward.worth`.
        finite: bool (B,), nothing of it is NaN or infinite.
        untrusted, discarded, disagreement: (B,), see `ImaginedChunk`.
        states: float32 (B, F, S), the robot's units.
        images: uint8 (B, F, V, height, width, 3); None where one frame of several will be asked for.
        action_error: float32 (B, F), see `ImaginedChunk`; None where nothing is taken off for it.
        probability: float32 (B, F), of success, where it is known and `worth` is a verdict.
    """

    worth: np.ndarray
    finite: np.ndarray
    untrusted: np.ndarray
    discarded: np.ndarray
    disagreement: np.ndarray
    states: np.ndarray
    images: np.ndarray | None = None
    action_error: np.ndarray | None = None
    probability: np.ndarray | None = None


@torch.no_grad()
def read_chunk(
    world_model: WorldModel, chunk: ImaginedChunk, config: ImaginationConfig, every_image: bool = False
) -> Seen:
    """Bring a chunk to the host; with a single frame, or `every_image`, its pictures come along."""
    frames = chunk.frames
    finite = frames.latents.isfinite().flatten(1).all(1) & frames.states.isfinite().flatten(1).all(1)
    wanted = {
        "worth": worth(world_model, chunk, config),
        "finite": finite,
        "untrusted": chunk.untrusted,
        "discarded": chunk.discarded,
        "disagreement": chunk.disagreement,
        "states": world_model.raw_states(frames),
    }
    if every_image or frames.states.shape[1] == 1:
        wanted["images"] = world_model.decoded(frames)
    if chunk.action_error is not None:
        wanted["action_error"] = chunk.action_error
    if config.reward == "success" and world_model.metadata.success_probability is not None:
        wanted["probability"] = probability(world_model, chunk, config)
    return Seen(**dict(zip(wanted, download(*wanted.values()), strict=True)))


def download(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copy tensors of any types from the device in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    host = torch.cat(parts).cpu().split([len(part) for part in parts])
    # Cloned, so that each begins where its type may begin.
    return [
        part.clone().view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(host, tensors, strict=True)
    ]
