"""Broadcast of trained weights to the workers, in shards, each an object of Ray's store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from vla_rl.common.distributed.tensor_files import check_names, load_weights, trained_weights
from vla_rl.interfaces import Policy

SHARD_BYTES = 256 * 2**20  # What a worker unpacks at a time; a larger tensor is a shard of its own.

Packed = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Tensors as bytes, which the object store shares without a copy: name -> (dtype, shape, uint8)."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())
        for name, t in flat.items()
    }


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    """Undo `pack`."""
    return {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, data) in packed.items()
    }


def shards(tensors: Mapping[str, torch.Tensor], size: int = SHARD_BYTES) -> Iterator[Packed]:
    """Pack tensors in order, `size` bytes at a time or a tensor that is larger; one shard at a time is in memory."""
    part: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.nbytes > size:
            yield pack(part)
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.nbytes
    yield pack(part)


def load_shards(policy: Policy, packed: Iterable[Packed], source: str) -> None:
    """Load what `shards` made of `trained_weights`, a shard at a time.

    Raises:
        CheckpointError: missing or unknown weights, wrong shapes, NaN or infinity; the policy may have some by then.
    """
    given: set[str] = set()
    for shard in packed:
        given |= shard.keys()
        load_weights(policy, unpack(shard), source, is_part=True)
    check_names(given, trained_weights(policy).keys(), source)
