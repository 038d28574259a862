"""Safetensors files written one tensor at a time, so that a sharded model is never whole in one process's memory.

with gathers(tensors.values()):           # all processes
    if is_main:
        write_tensors(file, tensors)      # process 0, which gets each tensor whole when its turn comes

The bytes are those that safetensors' own `save_file` writes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from vla_rl.common.distributed.fsdp import like, local, whole

if TYPE_CHECKING:
    from vla_rl.interfaces import Policy

TENSOR_DTYPES = {  # In the order in which the format puts them: wide ones first, so that all are aligned.
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: number for number, dtype in enumerate(TENSOR_DTYPES)}
_ALIGNMENT = 8


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a safetensors file; at no time is more than one copied, gathered or converted.

    Args:
        tensors: name -> tensor, any device; sharded ones inside `gathers`. Those that share storage are each written.
        dtypes: name -> the dtype to store it as; those not named as they are.
        metadata: of the file's header.

    Raises:
        ValueError: a dtype that the format has not.
        OSError: the disk is full or not writable.
    """
    stored = {name: (dtypes or {}).get(name, tensor.dtype) for name, tensor in tensors.items()}
    if unknown := sorted(name for name, dtype in stored.items() if dtype not in TENSOR_DTYPES):
        raise ValueError(f"{unknown[0]} has dtype {stored[unknown[0]]}, which safetensors files do not hold")
    names = sorted(tensors, key=lambda name: (_ORDER[stored[name]], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * stored[name].itemsize
        header[name] = {
            "dtype": TENSOR_DTYPES[stored[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = whole(tensors[name]).detach().to("cpu", stored[name]).contiguous()
            if data.numel():
                stream.write(data.reshape(-1).view(torch.uint8).numpy())


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, corrupt or does not fit; the message says which and what to do."""


def trained_weights(policy: torch.nn.Module | Policy, prefix: str = "policy.") -> dict[str, torch.Tensor]:
    """Return a module's weights and buffers without its frozen parameters, under `prefix`."""
    module = cast(torch.nn.Module, policy)  # Every policy is one.
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {prefix + name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def load_weights(
    policy: torch.nn.Module | Policy,
    tensors: Mapping[str, torch.Tensor],
    source: str,
    prefix: str = "policy.",
    is_part: bool = False,
) -> None:
    """Undo `trained_weights`: every weight that is not frozen must be there, fit and be finite.

    Args:
        is_part: some of the weights; the others stay as they are.

    Raises:
        CheckpointError: missing or unknown weights, wrong shapes, NaN or infinity.
    """
    given = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    wanted = trained_weights(policy, prefix="")
    check_names(given.keys(), given.keys() & wanted.keys() if is_part else wanted.keys(), source)
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(wanted[name].shape)}. "
                "Was it made with another policy config?"
            )
    given = {name: like(tensor, wanted[name]) for name, tensor in given.items()}
    check_finite({name: local(tensor) for name, tensor in given.items()}, source)
    cast(torch.nn.Module, policy).load_state_dict(given, strict=False)


def check_names(given: Set[str], wanted: Set[str], source: str) -> None:
    """Raise `CheckpointError` unless the weights given are those wanted."""
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if missing or unknown:
        raise CheckpointError(
            f"{source}: weights do not fit this model: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. Was it made with another policy config?"
        )


def check_finite(tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise `CheckpointError` if any floating tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{source}: {name} holds NaN or infinite values; use an earlier checkpoint.")
