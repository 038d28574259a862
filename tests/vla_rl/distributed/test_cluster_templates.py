"""The batch scripts of docs/examples/cluster: run by the real torchrun; Slurm's own two commands are stood in for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import make_recipe, metrics, save_policy

from vla_rl.config import dump_yaml

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT / "docs" / "examples" / "cluster"
ITERATIONS = 16


@pytest.mark.parametrize("script", sorted(TEMPLATES.glob("*.sbatch")), ids=lambda script: script.name)
def test_script_is_bash_with_what_slurm_reads_first(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text(encoding="utf-8").splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and max(options) < first_command, "Slurm stops reading options at the first command"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_job_near_its_limit_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    policy, run, queue = save_policy(tmp_path / "policy"), tmp_path / "run", tmp_path / "requeued"
    recipe = tmp_path / "recipe.yaml"
    values = make_recipe(policy, f"train.iterations={ITERATIONS}", "train.keep=last")
    recipe.write_text(dump_yaml(values), encoding="utf-8")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {queue}\n', encoding="utf-8")
    (tools / "scontrol").chmod(0o755)
    environment = os.environ | {
        "VENV": str(Path(sys.executable).parent.parent),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_GPUS_ON_NODE": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", str(TEMPLATES / "one_node.sbatch"), str(recipe), "--output", str(run)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as job:
        try:
            deadline = time.monotonic() + 240
            while not (run / "metrics.jsonl").is_file() or len(metrics(run)) < 3:
                assert job.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            job.send_signal(signal.SIGTERM)  # What --signal=B:TERM@300 sends, to the script alone.
            job.wait(120)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert queue.read_text() == "requeue 17\n"
    stopped = len(metrics(run))
    assert 3 <= stopped < ITERATIONS

    subprocess.run(command, env=environment, timeout=290, check=True)
    steps = [row["step"] for row in metrics(run) if "train/success" in row]
    assert steps == list(range(1, ITERATIONS + 1))
