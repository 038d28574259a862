"""Precision: whether a device computes fast in bfloat16."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["auto", "fp32", "tf32", "bf16"]


def wants_bf16(precision: Precision, device_type: str) -> bool:
    """Whether to compute in bfloat16: as asked, or with "auto" where the device multiplies it faster than float32."""
    if precision != "auto":
        return precision == "bf16"
    if device_type != "cpu":
        return device_type == "cuda"
    cpu = torch.cpu
    return cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()


def set_float32_products(precision: Precision, device_type: str) -> None:
    """Let NVIDIA GPUs multiply what stays in float32 in TF32, in this process, unless full float32 was asked for.

    TF32 keeps 10 bits of the factors' mantissas and adds up in float32; it is several times faster. On a CPU nothing
    is changed.
    """
    if device_type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
