"""What a world model remembers of an episode, as arrays of a keyframe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vla_rl.types import Keyframe
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.types import Frames

KIND = "world_model"
BFLOAT16 = ":bfloat16"  # Ends the name of an array that holds the bits of one, which numpy does not know.


def memory_arrays(memory: Memory) -> dict[str, np.ndarray]:
    """Of one episode; its instruction is not among them."""
    return dict(_as_array(f"memory.{name}", tensor[0]) for name, tensor in memory.tensors().items())


def saved_memory(
    world_model: WorldModel, keyframe: Keyframe, instruction: str, seed: int | None, posterior: bool
) -> Memory:
    """What the keyframe remembers, with its own noise or that of a seed.

    Raises:
        ValueError: a keyframe of another world model.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, array in keyframe.arrays.items():
        if name.startswith("memory."):
            tensor = _as_tensor(name, array)[None].to(world_model.device)
            tensors[name.removeprefix("memory.").removesuffix(BFLOAT16)] = tensor
    other = "keyframe: is of another world model, or older than this version; use one that was saved in this one"
    facts = world_model.metadata
    expected = {
        "reference.latents": (1, 1, len(facts.cameras), *world_model.autoencoder.latent_shape),
        "reference.states": (1, 1, facts.state_dim),
    }
    if any(name not in tensors or tensors[name].shape != shape for name, shape in expected.items()):
        raise ValueError(other)
    reference = Frames(tensors["reference.latents"], tensors["reference.states"])
    blank = world_model.begin(reference, [instruction], [seed or 0])
    if posterior:
        blank = world_model.with_members(blank, [0])  # The keyframe has its own, which is gone on with.
    if {n: t.shape for n, t in blank.tensors().items()} != {n: t.shape for n, t in tensors.items()}:
        raise ValueError(other)
    memory = blank.with_tensors(tensors)
    return memory if seed is None else replace(memory, noise=blank.noise)


def _as_array(name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return name + BFLOAT16, tensor.view(torch.int16).numpy().copy()
    return name, tensor.numpy().copy()


def _as_tensor(name: str, array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if name.endswith(BFLOAT16) else tensor
