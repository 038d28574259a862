"""Numbers that a device computed, brought to the host in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def read_scalars(values: Sequence[Any]) -> Iterator[float]:
    """Return numbers, some of them scalars on a device, in order. The host waits for the device once, not once each.

    Args:
        values: tensors of one element, on one device or the CPU, and plain numbers.
    """
    away = [isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values]
    there = [value.detach().reshape(1) for value, is_away in zip(values, away, strict=True) if is_away]
    read = iter(torch.cat(there).tolist() if there else ())
    return iter([next(read) if is_away else _number(value) for value, is_away in zip(values, away, strict=True)])


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
