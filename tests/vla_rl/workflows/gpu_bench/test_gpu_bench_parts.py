"""Each part of the GPU benchmark whole, tiny, on the CPU or the pretend device; and faults that it must find."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from pretend_device import pretending
from representatives import slow_but_for

from vla_rl.policies.openvla.network.network import OpenVLANetwork
from vla_rl.workflows.gpu_bench import large_policy, policy_matrix
from vla_rl.workflows.gpu_bench.command import finish, open_results, run_inside
from vla_rl.workflows.gpu_bench.parts import PARTS, correctness
from vla_rl.workflows.gpu_bench.parts import act as act_part
from vla_rl.workflows.gpu_bench.record import Results
from world_model.model.dynamics import VideoDynamics

ROOT = Path(__file__).resolve().parents[4]
# `rl7b` is tried on both devices by test_rl7b.py; `rates` is measured by the command in test_gpu_bench_run.py,
# `imagination` and `act` are measured by others here.
OTHERS = [part for part in PARTS if part != "rl7b"]


@pytest.fixture
def results(tmp_path) -> Results:
    return open_results(tmp_path, "tiny", "cpu", resume=False)


def check(results: Results, part: str, device: str) -> None:
    run_inside(results, part, device, 300)
    record = results.parts[part]
    assert record.errors == [] and record.state == "done" and record.rows and not record.pending
    assert all(row.value is not None for row in record.rows)
    assert finish(results) == 0


@pytest.mark.parametrize("part", slow_but_for(("correctness", "runs", "video"), OTHERS))
def test_a_part_runs_whole_on_the_cpu(results, part):
    check(results, part, "cpu")


# `memory` is tried on the CPU alone: its prediction watches weights, and a module watched so cannot be moved there.
@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in OTHERS if part != "memory"])
def test_a_part_runs_whole_on_the_pretend_device(results, part):
    with pretending():
        check(results, part, "pretend")


@pytest.mark.slow
def test_compiled_imagination_is_compared_with_the_cpu_and_timed(results, monkeypatch):
    compiled = []
    compile_imagining = VideoDynamics.compile_imagining
    monkeypatch.setattr(
        VideoDynamics, "compile_imagining", lambda self, backend: compiled.append(compile_imagining(self, backend))
    )
    run_inside(results, "imagination", "cpu", 300)
    rows = {row.what: row for row in results.parts["imagination"].rows}
    assert results.parts["imagination"].state == "done" and len(compiled) == 2
    for what in ("latents", "success score", "clip score"):
        assert rows[f"imagined {what}, compiled"].verdict == rows[f"imagined {what}, graphs"].verdict == "met"
    for form in ("", ", graphs", ", compiled"):
        assert rows[f"64 pixels, 2 environments{form}"].value > 0


def test_a_compiled_dynamics_that_replays_old_numbers_is_found(results, monkeypatch):
    """As a graph does that keeps the values of its first inputs."""

    def replaying(self, backend):
        imagine_one, kept = self._imagine_one, []

        def replay(*inputs):
            if not kept:
                kept.append(imagine_one(*inputs))
            return kept[0]

        self._imagine_one = replay

    monkeypatch.setattr(VideoDynamics, "compile_imagining", replaying)
    run_inside(results, "imagination", "cpu", 300)
    wrong = [row.what for row in results.parts["imagination"].rows if row.verdict == "wrong"]
    assert "imagined latents, compiled" in wrong and "imagined latents" not in wrong


def test_wrong_numbers_are_found(results, monkeypatch, capsys):
    build = policy_matrix.build

    def build_wrong(name, device, seed=0):
        policy = build(name, device, seed)
        if isinstance(device, torch.device):  # The one that is checked; the CPU's is built by name.
            next(p for n, p in policy.named_parameters() if "o_proj" in n).data.mul_(1.05)
        return policy

    monkeypatch.setattr(policy_matrix, "build", build_wrong)
    monkeypatch.setattr(correctness, "TINY", ("openvla-lora",))  # Learners are compared in the part's own test.
    run_inside(results, "correctness", "cpu", 300)
    wrong = [row.what for row in results.parts["correctness"].rows if row.verdict == "wrong"]
    assert "openvla-lora: evaluate and backward" in wrong and "openvla-lora: embed" in wrong
    assert finish(results) == 1 and "FAULT correctness: wrong: openvla-lora: embed" in capsys.readouterr().out


def test_a_policy_that_gives_nan_is_no_figure(results, monkeypatch):
    def nan(self, hidden):
        return torch.full((*hidden.shape[:-1], self.architecture.action_bins), torch.nan)

    monkeypatch.setattr(OpenVLANetwork, "logits", nan)
    monkeypatch.setattr(act_part, "FORMS", [("parallel", "LoRA", "eager")])
    run_inside(results, "act", "cpu", 300)
    assert "no likelihood" in results.parts["act"].errors[0] and results.parts["act"].rows == []


def test_acting_is_measured_before_and_after_in_one_call(results, monkeypatch):
    forms = [form for form in act_part.FORMS if form[2] in ("eager", act_part.GRAPH)]
    monkeypatch.setattr(act_part, "FORMS", forms)
    monkeypatch.setattr(act_part, "SIZES", {"tiny": (1,), "full": ()})
    check(results, "act", "cpu")
    assert [row.what for row in results.parts["act"].rows] == [f"{', '.join(form)}, B=1" for form in forms]
    assert {(decoder, how) for decoder, weights, how in forms if weights == "LoRA"} == {
        (decoder, how) for decoder in ("parallel", "autoregressive") for how in ("eager", "CUDA graph")
    }


def test_batches_that_do_not_fit_are_left_out_and_smaller_ones_measured(results, monkeypatch):
    def observations(policy, batch_size):
        if batch_size > 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory at {batch_size}")
        return large_policy.observations(policy, batch_size)

    monkeypatch.setattr(act_part, "observations", observations)
    monkeypatch.setattr(act_part, "FORMS", [("parallel", "merged", "eager")])
    monkeypatch.setattr(act_part, "SIZES", {"tiny": (2, 1), "full": ()})
    run_inside(results, "act", "cpu", 300)
    record = results.parts["act"]
    assert [row.what for row in record.rows] == ["parallel, merged, eager, B=1"] and record.state == "done"
    assert record.left_out == ["parallel, merged, eager, B=2: out of memory (CUDA out of memory at 2)"]


@pytest.mark.parametrize(
    ("found", "expected", "gap"),
    [
        ({"x": np.ones(3)}, {"x": np.ones(3) + 2e-3}, 2e-3),
        ({"x": np.ones(3)}, {"x": np.ones(4)}, np.inf),
        ({"x": np.ones(3)}, {}, np.inf),
        ({"tokens": np.zeros(100)}, {"tokens": np.eye(1, 100)[0]}, 0.0),
        ({"tokens": np.zeros(100)}, {"tokens": np.ones(100)}, 0.98),
    ],
)
def test_differences_of_answers(found, expected, gap):
    assert policy_matrix.difference(found, expected) == pytest.approx(gap)


def test_an_answer_with_nan_differs():
    assert np.isnan(policy_matrix.difference({"x": np.array([np.nan, 1.0])}, {"x": np.ones(2)}))


def test_the_large_policy_is_the_same_each_time_and_its_frozen_weights_are_in_bfloat16():
    config = large_policy.options(False, **large_policy.PARALLEL, **large_policy.LORA)
    first, second = (large_policy.on_device(config, torch.device("cpu"), seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert {p.dtype for p in first.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in first.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(p.abs().sum() > 0 for n, p in first.named_parameters() if "lora_B" in n)  # Gradients reach lora_A.


# What pip installs with torch and numpy alone; no other package of this environment.
ALONE = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "filelock", "typing_extensions.py", "fsspec", "setuptools",
)  # fmt: skip


def measured_alone(folder: Path) -> tuple[Results, str]:
    """What the benchmark measures from a plain checkout where torch alone is installed, and its output."""
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for name in ALONE:
        (site / name).symlink_to(Path(torch.__file__).parents[1] / name)
    command = [str(folder / "venv/bin/python"), "-m", "vla_rl.workflows.gpu_bench", "--device", "cpu", "--size", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", "out"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return Results.load(folder / "out"), done.stdout


@pytest.mark.slow
def test_with_torch_alone_it_measures_what_it_can_and_says_what_it_left_out(tmp_path):
    results, output = measured_alone(tmp_path)
    parts = results.parts
    assert list(parts) == list(PARTS) and parts["rates"].state == "done" and len(parts["rates"].rows) >= 6
    assert {part.state for name, part in parts.items() if name != "rates"} == {"left out"}
    assert "needs pydantic, yaml, safetensors, timm" in parts["act"].left_out[0]
    assert (tmp_path / "out" / "report.html").is_file() and "left out: needs pydantic" in output


def test_without_torch_the_command_says_what_it_needs(tmp_path):
    command = [sys.executable, "-S", "-m", "vla_rl.workflows.gpu_bench", "--size", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: needs at least torch and numpy; this Python lacks torch, numpy"
