"""Safetensors files of a sharded model, which is never whole in one process's memory.

Written one tensor at a time:

with gathers(tensors.values()):           # all processes
    if is_main:
        write_tensors(file, tensors)      # process 0, which gets each tensor whole when its turn comes

The bytes are those that safetensors' own `save_file` writes (https://github.com/huggingface/safetensors#format).

Read in parts, each process its own, once the policy is sharded:

with deferred(): policy = build()    # Its parameters have shapes, dtypes and devices, but no memory.
awaited = sources(policy)            # Then they are cut up:
read_parts(policy, awaited)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

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


_SOURCE = "_read_from"  # On a parameter without memory: the file that it waits in, and its name there.
_deferring = [False]


def is_deferring() -> bool:
    """Whether who reads a policy leaves its weights in their files, for `read_parts`."""
    return _deferring[-1]


@contextmanager
def deferred() -> Iterator[None]:
    """Inside the block policies that can leave their weights in their files."""
    _deferring.append(True)
    try:
        yield
    finally:
        _deferring.pop()


@contextmanager
def without_memory(device: str | torch.device) -> Iterator[None]:
    """Inside the block, parts of our modules lose their weights once they are made: one part at a time has memory.

    Random numbers are drawn as ever, so that what is made afterwards is as it would be.
    """

    def forget(parent: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is not None and type(parent).__module__.startswith("vla_rl."):  # Others initialize what they made.
            for module in part.modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None and not hasattr(parameter, _SOURCE):
                        module._parameters[key] = placeholder(parameter.shape, parameter.dtype, device)

    handle = register_module_module_registration_hook(forget)
    try:
        yield
    finally:
        handle.remove()


def placeholder(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, source: tuple[Path, str] | None = None
) -> nn.Parameter:
    """A parameter without memory, to be read from its source: a safetensors file, and its name there."""
    result = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad=False)
    setattr(result, _SOURCE, source)
    return result


def is_placeholder(parameter: Tensor) -> bool:
    """Whether the parameter waits in a file."""
    return hasattr(parameter, _SOURCE)


def replace(network: nn.Module, name: str, tensor: Tensor) -> None:
    """Put another tensor in the place of a parameter."""
    module, _, leaf = name.rpartition(".")
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    setattr(network.get_submodule(module), leaf, parameter)


def leave_in_files(network: nn.Module, files: Mapping[str, tuple[Path, str]]) -> None:
    """Let parameters wait in safetensors files, without memory; those tied to them wait with them.

    Args:
        files: name -> file, and name in it.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    waiting: dict[int, nn.Parameter] = {}
    for name, source in files.items():
        parameter = parameters[name]
        waits = placeholder(tuple(parameter.shape), parameter.dtype, parameter.device, source)
        waits.requires_grad_(parameter.requires_grad)
        waiting[id(parameter)] = waits
    for name, parameter in parameters.items():
        if id(parameter) in waiting:
            replace(network, name, waiting[id(parameter)])


def await_file(network: nn.Module, file: Path) -> set[str]:
    """Let the network's placeholders be read from this file, by their names in the network; returns them."""
    found = {name: parameter for name, parameter in network.named_parameters() if is_placeholder(parameter)}
    for name, parameter in found.items():
        setattr(parameter, _SOURCE, (file, name))
    return set(found)


def sources(policy: nn.Module) -> dict[str, tuple[Path, str]]:
    """A policy's parameters that wait: name -> file, and name in it."""
    return {name: getattr(p, _SOURCE) for name, p in policy.named_parameters() if is_placeholder(p)}


@torch.no_grad()
def read_parts(policy: nn.Module, awaited: Mapping[str, tuple[Path, str]]) -> None:
    """Fill this process's parts of a sharded policy's parameters from their files.

    Raises:
        ValueError: NaN or infinity.
    """
    parameters = dict(policy.named_parameters())
    for name, (file, key) in awaited.items():
        part = local(parameters[name])
        if not part.numel():
            continue
        chunk = cast(Any, parameters[name]).__create_chunk_list__()[0]
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        with safe_open(file, framework="pt") as stored:  # Opened for each, since what was read of it stays mapped.
            part.copy_(stored.get_slice(key)[where])
        if not bool(torch.isfinite(part).all()):
            raise ValueError(f"{file}: NaN or infinity in {key}. Use an earlier checkpoint of the run.")
