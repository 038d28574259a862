"""Rates of this machine that nothing can exceed: matrix products, copies, and how fast work can be handed over."""

from __future__ import annotations

import torch

from vla_rl.workflows.gpu_bench.sheet import Sheet
from vla_rl.workflows.gpu_bench.timing import exact_float32, median_device_seconds, median_seconds

LAUNCHES = 1000


def measure(sheet: Sheet) -> None:
    """Products of random matrices, as zeros run faster than any real data."""
    sheet.run(
        [
            ("matrix products in bf16", lambda: _products(sheet, "bf16", torch.bfloat16, "highest")),
            ("matrix products in fp32", lambda: _products(sheet, "fp32", torch.float32, "highest")),
            ("matrix products in tf32", lambda: _products(sheet, "tf32", torch.float32, "high")),
            ("copies on the device", lambda: _copies(sheet)),
            ("copies from the host", lambda: _uploads(sheet)),
            ("launches", lambda: _launches(sheet)),
        ]
    )


def _products(sheet: Sheet, name: str, dtype: torch.dtype, precision: str) -> None:
    size = 8192 if sheet.is_full else 128
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(size, size, generator=generator).to(sheet.device, dtype) for _ in range(3)]
    out = torch.empty_like(draws[0])
    turn = iter(range(1_000_000))

    def product() -> None:
        i = next(turn)
        torch.mm(draws[i % 3], draws[(i + 1) % 3], out=out)

    with exact_float32():
        torch.set_float32_matmul_precision(precision)
        seconds = median_device_seconds(product, sheet.device, 20 if sheet.is_full else 3)
    rate = 2 * size**3 / seconds
    sheet.fact(f"flops_{name}", rate)
    sheet.add(f"{name} product of {size} x {size}", rate / 1e12, "TFLOP/s")


def _copies(sheet: Sheet) -> None:
    size = 2**30 if sheet.is_full else 2**16
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=sheet.device)
    target = torch.empty_like(source)
    seconds = median_device_seconds(lambda: target.copy_(source), sheet.device, 10 if sheet.is_full else 3)
    sheet.fact("bytes_per_second", 2 * size / seconds)
    sheet.add("copy on the device, bytes read and written", 2 * size / seconds / 1e9, "GB/s")


def _uploads(sheet: Sheet) -> None:
    size = 2**28 if sheet.is_full else 2**16
    kinds = {"pageable": torch.zeros(size, dtype=torch.uint8)}
    if sheet.device.type == "cuda":
        kinds["pinned"] = torch.zeros(size, dtype=torch.uint8).pin_memory()
    for name, source in kinds.items():
        seconds = median_seconds(lambda source=source: source.to(sheet.device), sheet.device, 5)
        sheet.add(f"copy from the host, {name}", size / seconds / 1e9, "GB/s")


def _launches(sheet: Sheet) -> None:
    x = torch.zeros(1, device=sheet.device)
    count = LAUNCHES if sheet.is_full else 10

    def launch() -> None:
        for _ in range(count):
            x.add_(1)

    seconds = median_seconds(launch, sheet.device, 5)
    sheet.fact("launch_seconds", seconds / count)
    sheet.add("one small operation after another", 1e6 * seconds / count, "µs each")
