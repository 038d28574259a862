"""The batch scripts of docs/examples/cluster: run by the real torchrun; Slurm's own two commands are stood in for."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from tiny_run import make_recipe, metrics, save_policy

from vla_rl.config import dump_yaml
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.actors.config import WORKER_CPUS

ROOT = Path(__file__).resolve().parents[4]
TEMPLATES = ROOT / "docs" / "examples" / "cluster"
ITERATIONS = 16


@pytest.mark.parametrize("script", sorted(TEMPLATES.glob("*.sbatch")), ids=lambda script: script.name)
def test_script_is_bash_with_what_slurm_reads_first(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text(encoding="utf-8").splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and max(options) < first_command, "Slurm stops reading options at the first command"


def test_the_first_node_trains_and_the_others_roll_out(tmp_path: Path) -> None:
    """Slurm, Ray and torchrun are stood in for by programs that say how they were called."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    (tools / "activate").touch()
    others_first = f'case "$*" in *torchrun*) until [ "$(wc -l < {calls})" -ge 2 ]; do sleep 0.1; done;; esac'
    scripts = {
        "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
        "srun": f'{others_first}; echo "$RAY_AUTH_MODE $*" >> {calls}',
        "ray": "exit 0",
    }
    for name, what in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{what}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "4",
    }
    script = TEMPLATES / "ray_nodes.sbatch"
    subprocess.run(["bash", str(script), "some_recipe", "--output", "runs/x"], check=True, env=environment)
    lines = calls.read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("token --overlap ") for line in lines) and len(lines) == 3
    head, others, training = (
        next(line for line in lines if word in line) for word in ("--head", "start --addr", "train")
    )
    assert "--nodelist=node1" in head and "--num-cpus=0 --num-gpus=0" in head
    assert "--nodes=2 --ntasks=2 --exclude=node1" in others and "--address=node1:6379" in others
    assert "--nodelist=node1" in training and "--nproc-per-node 4" in training
    assert "train some_recipe rollout.kind=ray rollout.address=node1:6379 rollout.workers=2" in training
    assert training.endswith("--output runs/x")


def test_the_rayjob_names_what_the_project_has() -> None:
    job = yaml.safe_load((TEMPLATES / "rayjob.yaml").read_text(encoding="utf-8"))
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    shell = shlex.split(spec["entrypoint"])
    assert shell[:2] == ["bash", "-c"] and len(shell) == 3
    subprocess.run(["bash", "-n", "-c", shell[2]], check=True)
    folder = re.search(r"-e (\S+)/config.yaml", shell[2])
    command = shlex.split(shell[2].partition("exec ")[2])
    program, train, name, *overrides, output, path, resume = command
    assert (program, train, output, resume) == ("vla-rl", "train", "--output", "${resume[@]}")
    assert folder is not None and path == folder[1], "the run that is gone on with is the one that is written"
    recipe = load_recipe(name, overrides)  # The keys are checked.
    rollout: Any = recipe.rollout
    (workers,), head = cluster["workerGroupSpecs"], cluster["headGroupSpec"]
    assert rollout.kind == "ray" and rollout.workers == workers["replicas"] == workers["maxReplicas"]
    containers = [group["template"]["spec"]["containers"][0] for group in (head, workers)]
    assert all(float(c["resources"]["limits"]["nvidia.com/gpu"]) >= rollout.worker_gpus for c in containers)
    assert WORKER_CPUS + rollout.hosts * rollout.host_cpus <= float(containers[1]["resources"]["limits"]["cpu"])
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}, "Ray gives out nothing of the head"
    # Names: the image has its CUDA tag in the Dockerfile, the mounts have their volumes, and the run lies on one.
    image = containers[0]["image"]
    assert all(c["image"] == image for c in containers) and image.startswith("vla-rl:cuda")
    assert "docker build -t vla-rl:cuda" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for group, container in zip((head, workers), containers, strict=True):
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert any(path.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (ray,) = [SpecifierSet(name.partition("]")[2]) for name in required["ray"] if name.startswith("ray")]
    assert cluster["rayVersion"] in ray


@pytest.mark.parametrize(
    ("nodes", "ray", "said"), [("1", "exit 0", "give two or more"), ("2", "exit 1", "did not answer at node1:6379")]
)
def test_a_job_that_cannot_work_ends_with_the_reason(nodes: str, ray: str, said: str, tmp_path: Path) -> None:
    """One node, or a head that never answers: nothing is trained."""
    (tmp_path / "bin").mkdir()
    for name, what in {"scontrol": "echo node1", "srun": f"echo $* >> {tmp_path / 'calls'}", "ray": ray}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{what}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "activate").touch()
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": nodes,
        "HEAD_TRIES": "0",
    }
    command = ["bash", str(TEMPLATES / "ray_nodes.sbatch"), "some_recipe"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr
    assert not (tmp_path / "calls").exists() or "train" not in (tmp_path / "calls").read_text()


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
