"""Which precision a device computes fast in."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["auto", "fp32", "bf16"]


def wants_bf16(precision: Precision, device_type: str) -> bool:
    """Whether to compute in bfloat16: as asked, or with "auto" where the device multiplies it faster than float32."""
    if precision != "auto":
        return precision == "bf16"
    if device_type != "cpu":
        return device_type == "cuda"
    cpu = torch.cpu
    return cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()  # pyright: ignore[reportAttributeAccessIssue]
