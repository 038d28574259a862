"""Safetensors files written one tensor at a time, so that a sharded model is never whole in one process's memory.

with gathers(tensors.values()):           # all processes
    if is_main:
        write_tensors(file, tensors)      # process 0, which gets each tensor whole when its turn comes

The bytes are those that safetensors' own `save_file` writes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vla_rl.common.distributed.fsdp import whole

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
