"""Training in several processes: the same updates as one process, with ddp and fsdp, and what a run of it writes.

Real processes, over gloo on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import save_policy
from together import ALGOS, ENV, run

from vla_rl.checkpoint import trained_weights
from vla_rl.collect import CollectConfig, collect_dataset
from vla_rl.distributed import ALONE
from vla_rl.policies.base import load_policy

HERE = Path(__file__).resolve().parent
TIME_LIMIT = 280


def launch(*arguments: str, module: bool = False, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script (or a module) in several processes; they are killed after the time limit."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*launcher, *(["-m"] if module else []), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("distributed") / "base")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("distributed") / "demos"
    collect_dataset(ENV, CollectConfig(dataset=str(path), episodes_per_task=4))
    return path


@pytest.fixture(scope="module")
def together(policy, dataset, tmp_path_factory) -> Path:
    """What two processes made of one update of each kind."""
    output = tmp_path_factory.mktemp("together")
    result = launch(str(HERE / "together.py"), str(policy), str(dataset), str(output))
    assert result.returncode == 0, result.stderr[-4000:]
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGOS, "sft"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_update_of_one(together, policy, dataset, strategy, name):
    folder = together / f"{strategy}-{name}"
    tensors, metrics = load_file(folder / "tensors.safetensors"), json.loads((folder / "metrics.json").read_text())
    expected, expected_metrics = run(name, policy, dataset, ALONE)
    start = trained_weights(load_policy(policy))
    assert any((expected[n] - t).abs().max() > 1e-4 for n, t in start.items()), "the update did nothing"
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        # Weights are compared by how far they moved; Adam makes much of rounding where a gradient is almost zero.
        moved = value - start.get(key, torch.zeros_like(value))
        assert (tensors[key] - value).norm() <= 0.01 * moved.norm() + 1e-9, key
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
