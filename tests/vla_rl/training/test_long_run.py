"""Three hundred iterations of a tiny run: memory and descriptors stay where they were after the first ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_run import make_recipe, save_policy

from vla_rl.training.train import train

ITERATIONS, WARM = 300, 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_and_descriptors_are_flat_over_three_hundred_iterations(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    recipe = make_recipe(policy, f"train.iterations={ITERATIONS}", "train.save_every=20")
    memory, descriptors = [], []

    def look() -> None:
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        descriptors.append(len(os.listdir("/proc/self/fd")))

    train(recipe, tmp_path / "run", on_iteration=look)
    half = (WARM + ITERATIONS) // 2
    assert len(memory) == ITERATIONS
    assert max(descriptors[WARM:]) == min(descriptors[WARM:])
    assert max(memory[half:]) < 1.02 * max(memory[WARM:half]), [f"{size / 2**20:.0f} MB" for size in memory[::20]]
