"""Which operations a GPU would refuse, and for which the host would have to wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

NAME = "pretend"

# The host reads a number, or the size of the result depends on values.
_SYNCING = {
    "_local_scalar_dense": 1, "is_nonzero": 1, "equal": 1,
    "nonzero": 1, "masked_select": 1, "_unique2": 1, "unique_consecutive": 1, "unique_dim": 1, "bincount": 1,
    "multinomial": 2,  # Torch checks the probabilities.
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
TRANSFERS = {"copy_", "_to_copy", "_copy_from", "_copy_from_and_resize", "set_"}
# Operations that launch nothing; views are recognized by their schema.
_FREE = {
    "detach", "alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view",
    "lift_fresh", "resize_", "set_", "_local_scalar_dense", "_reshape_alias", "is_pinned",
    "_has_same_storage_numel", "_fused_sdp_choice",
}  # fmt: skip


@cache
def op_name(op: OpOverload) -> str:
    """The operation's name without namespace and overload."""
    return op._schema.name.partition("::")[2]


def num_syncs(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How often the host waits within an operation on device tensors."""
    name = op_name(op)
    if name == "repeat_interleave":
        return int(kwargs.get("output_size") is None)
    if name in INDEXING:
        masks = (torch.bool, torch.uint8)
        return sum(on_device(i) and i.dtype in masks for i in args[1] if i is not None)
    return _SYNCING.get(name, 0)


@cache
def launches(op: OpOverload) -> bool:
    """Whether the operation launches a kernel: views and allocations do not."""
    returns = op._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return not is_view and op_name(op) not in _FREE


def on_device(value: Any) -> bool:
    """Whether this is a tensor on the pretend device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def names_device(device: Any) -> bool:
    """Whether a `device` argument names the pretend device."""
    return device is not None and torch.device(device).type == NAME


def check_generator(op: OpOverload, generator: torch.Generator) -> None:
    """Refuse a generator of another device.

    Raises:
        RuntimeError: as on CUDA.
    """
    if generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}' in {op}")


def check_devices(op: OpOverload, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an operation between tensors of the device and the host's.

    As on CUDA, the host's tensors without dimensions pass in pointwise operations that do not write to them, and
    its index tensors pass where a device tensor is indexed.

    Args:
        tensors: all that the operation was given, some on the device.

    Raises:
        RuntimeError: mixed devices.
    """
    name = op_name(op)
    strangers = [t for t in tensors if not on_device(t)]
    if not strangers or name in TRANSFERS:
        return
    if name in INDEXING:
        if on_device(args[0]):
            values = [a for a in args[2:] if isinstance(a, torch.Tensor)]
            strangers = [t for t in values if not on_device(t) and t.dim() > 0]
    elif torch.Tag.pointwise in op.tags:
        written = [
            a for a, s in zip(args, op._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        strangers = [t for t in strangers if t.dim() > 0 or any(t is w for w in written)]
    if strangers:
        found = [(tuple(t.shape), str(t.device)) for t in tensors][:6]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {op} got (shape, device): {found}")
