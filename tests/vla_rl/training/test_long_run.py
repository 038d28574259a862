"""Three hundred iterations of a tiny run: memory, descriptors and an iteration's CPU time stay as after the first ones.

CPU time is held against the same run's own, median against median, so that a busy machine changes neither.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_run import make_recipe, save_policy

from vla_rl.training.train import train

ITERATIONS, WARM = 300, 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_descriptors_and_rate_are_flat_over_three_hundred_iterations(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    recipe = make_recipe(policy, f"train.iterations={ITERATIONS}", "train.save_every=20")
    memory, descriptors, spent = [], [], []

    def look() -> None:
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        descriptors.append(len(os.listdir("/proc/self/fd")))
        spent.append(time.process_time())

    train(recipe, tmp_path / "run", on_iteration=look)
    half = (WARM + ITERATIONS) // 2
    assert len(memory) == ITERATIONS
    assert max(descriptors[WARM:]) == min(descriptors[WARM:])
    each = np.diff(spent)  # CPU seconds of iterations of equally many episodes.
    first, last = np.median(each[WARM:half]), np.median(each[half:])
    assert last < 1.15 * first, f"an iteration took {first:.3f}, then {last:.3f} s"
    assert max(memory[half:]) < 1.02 * max(memory[WARM:half]), [f"{size / 2**20:.0f} MB" for size in memory[::20]]
