"""Sharded loading: each process reads its part of the weights from their file, once the policy is sharded.

with deferred(): policy = build()    # Its parameters have shapes, dtypes and devices, but no memory.
awaited = sources(policy)            # Then they are cut up:
read_parts(policy, awaited)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from vla_rl.common.distributed.fsdp import local

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
