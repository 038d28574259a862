"""Two thousand resets of LIBERO: memory, descriptors and CPU time stay as they were once its scenes were built."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from vla_rl.types import EpisodeSpec

RESETS, WARM = 2_000, 200


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_assets
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_descriptors_and_rate_are_flat_over_two_thousand_resets() -> None:
    config = LiberoConfig(suite="libero_object", tasks=("0", "1"), image_size=64, assets_path=ASSETS)
    with closing(config.make()) as env:
        tasks = list(env.spec.tasks)
        seen = []
        for number in range(RESETS):
            env.reset(EpisodeSpec(tasks[number // 50 % 2], "train", number))
            if number >= WARM and number % 100 == 0:
                seen.append((resident_bytes(), len(os.listdir("/proc/self/fd")), time.process_time()))
    memory, descriptors, spent = zip(*seen, strict=True)
    half = len(memory) // 2
    assert max(descriptors) == min(descriptors)
    each = np.diff(spent)  # CPU seconds of a hundred resets.
    first, last = np.median(each[:half]), np.median(each[half:])
    assert last < 1.15 * first, f"a hundred resets took {first:.1f}, then {last:.1f} s"
    assert max(memory[half:]) < 1.02 * max(memory[:half]), [f"{size / 2**20:.0f} MB" for size in memory]
