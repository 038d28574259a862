"""Clocks for a device that works while the host goes on: medians of repeats after a warm-up; counted operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """Median wall time of a call until the device is done with it."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def median_device_seconds(run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Median time that the device takes for a call, by its own events; the wall time where it has none.

    For calls that only give the device work: the host stays ahead, so that its own time does not count.
    """
    if device.type != "cuda":
        return median_seconds(run, device, repeats, warm_up)
    for _ in range(warm_up):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    synchronize(device)
    for before, after in events:
        before.record()
        run()
        after.record()
    synchronize(device)
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1000.0


def count_flops(run: Callable[[], object]) -> float:
    """Floating point operations of the matrix products, convolutions and attention of a call, which is made once."""
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


@contextmanager
def exact_float32() -> Iterator[None]:
    """Inside the block float32 products are of float32 numbers, not of TF32's, so that devices can be compared."""
    matmul = torch.get_float32_matmul_precision()
    convolution = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes in use on the device during a call, what was there before included.

    Without a GPU's own counters: what the call's operations made, counted as they made it, beside nothing else.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    from vla_rl.training.memory import AllocationCounter  # Imports what part `rates` does without.

    with AllocationCounter() as counter:
        run()
    return counter.peak
