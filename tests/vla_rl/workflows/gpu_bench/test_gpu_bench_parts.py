"""Each part of the GPU benchmark whole, on the CPU at tiny size; and a fault that it must find."""

from __future__ import annotations

import pytest
import torch

from vla_rl.workflows.gpu_bench import policy_matrix
from vla_rl.workflows.gpu_bench.command import finish
from vla_rl.workflows.gpu_bench.record import Results
from vla_rl.workflows.gpu_bench.run import open_results, run_inside


@pytest.fixture
def results(tmp_path) -> Results:
    return open_results(tmp_path, "tiny", "cpu", resume=False)


@pytest.mark.parametrize("part", ["correctness", "runs"])
def test_a_part_runs_whole(results, part):
    run_inside(results, part, "cpu", 300)
    record = results.parts[part]
    assert record.errors == [] and record.state == "done" and record.rows
    assert finish(results) == 0


def test_wrong_numbers_are_found(results, monkeypatch, capsys):
    build = policy_matrix.build

    def build_wrong(name, device, seed=0):
        policy = build(name, device, seed)
        if isinstance(device, torch.device):  # The one that is checked; the CPU's is built by name.
            next(p for n, p in policy.named_parameters() if "o_proj" in n).data.mul_(1.05)
        return policy

    monkeypatch.setattr(policy_matrix, "build", build_wrong)
    run_inside(results, "correctness", "cpu", 300)
    wrong = [row.what for row in results.parts["correctness"].rows if row.verdict == "wrong"]
    assert "openvla-lora: evaluate and backward" in wrong and "openvla-lora: embed" in wrong
    assert finish(results) == 1 and "FAULT correctness: wrong: openvla-lora: embed" in capsys.readouterr().out
