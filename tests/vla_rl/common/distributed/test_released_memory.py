"""Memory that a process freed goes back to the system."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")
from vla_rl.rollout.actors.cluster import release_freed_memory


def resident() -> int:
    """Bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_between_used_blocks_goes_back() -> None:
    """Blocks too small for pages of their own: without this call the one that stays keeps all below it."""
    blocks = [np.ones(100_000, np.uint8) for _ in range(1000)]
    last = blocks[-1]
    del blocks
    kept = resident()
    release_freed_memory()
    assert kept - resident() > 50_000_000
    assert last.all()
