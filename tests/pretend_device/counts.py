"""What a block of code made the pretend device do: kernels, host syncs and copies, the latter two by place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{ROOT}/{package}/" for package in ("vla_rl", "world_model", "sim", "real_robot"))
BACKWARD = "backward pass"


@dataclass
class Counts:
    """What happened on the device while it was counted.

    Attributes:
        kernels: launches, by operation. One foreach or fused operation is one launch here.
        syncs: reads for which the host waits until the device is done, by (what, place).
        uploads: copies from the host to the device, by place. Those of no bytes are none.
        slow_uploads: those of them that are not `non_blocking`, in which torch makes the host wait on CUDA as well;
            they are not among `syncs`.
        downloads: copies from the device to the host, by place; those that make the host wait are also `syncs`.
        uploaded_bytes, downloaded_bytes: what these copies carried.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    slow_uploads: Counter[str] = field(default_factory=Counter)
    downloads: Counter[str] = field(default_factory=Counter)
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0

    @property
    def totals(self) -> dict[str, int]:
        """The totals, by name."""
        names = ("kernels", "syncs", "uploads", "slow_uploads", "downloads")
        return {name: getattr(self, name).total() for name in names}

    def places(self, num: int = 12) -> str:
        """Return the places with the most syncs and copies, a line each."""
        rows = [(n, f"{what:12s} {place}") for (what, place), n in self.syncs.items()]
        rows += [(n, f"{'slow upload':12s} {place}") for place, n in self.slow_uploads.items()]
        rows += [(n, f"{'upload':12s} {place}") for place, n in (self.uploads - self.slow_uploads).items()]
        return "\n".join(f"{n:6d} {text}" for n, text in sorted(rows, key=lambda row: (-row[0], row[1]))[:num])


_counting: list[Counts] = []


@contextmanager
def counting(counts: Counts | None = None) -> Iterator[Counts]:
    """Count what the block makes the device do; blocks may be nested, and each counts all of what is inside it.

    Args:
        counts: that are added to.
    """
    counts = Counts() if counts is None else counts
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [c for c in _counting if c is not counts]


def add_kernel(name: str) -> None:
    """Count a launch."""
    for counts in _counting:
        counts.kernels[name] += 1


def add_sync(what: str) -> None:
    """Count a wait of the host."""
    if _counting:
        key = (what, _place())
        for counts in _counting:
            counts.syncs[key] += 1


def add_upload(num_bytes: int, waits: bool) -> None:
    """Count a copy from the host to the device, in which the host waits or not."""
    if _counting and num_bytes:
        place = _place()
        for counts in _counting:
            counts.uploads[place] += 1
            counts.slow_uploads[place] += waits
            counts.uploaded_bytes += num_bytes


def add_download(num_bytes: int) -> None:
    """Count a copy from the device to the host."""
    if _counting and num_bytes:
        place = _place()
        for counts in _counting:
            counts.downloads[place] += 1
            counts.downloaded_bytes += num_bytes


def _place() -> str:
    """The innermost line of our packages on the stack, as file:line function."""
    frame = sys._getframe(2)
    last = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if "/tests/pretend_device/" not in file:
            last = file
        frame = frame.f_back
    return BACKWARD if last is None or "/torch/autograd/" in last else f"{Path(last).name}"
