"""Commands besides `train` on Ray's machines: datasets collected by hosts, and whole runs as tasks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from faulty_env import plant
from tiny_run import RECIPE, make_recipe, save_policy

from vla_rl.cli.options import PROGRAM as VLA_RL
from vla_rl.config import ConfigError, apply_overrides, dump_yaml
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import read_recipe
from vla_rl.workflows.collect import collect
from vla_rl.workflows.jobs import Cluster, Job, run_jobs
from vla_rl.workflows.sweep import RESULT_FILE, Sweep

ray = pytest.importorskip("ray")
from vla_rl.rollout.actors.cluster import Setting  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HOSTS = "rollout={kind: ray, hosts: 2, timeout_s: 30}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray that this process has joined, with room for three jobs at a time."""
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    yield "auto"
    ray.shutdown()


def episodes_of(dataset: Path) -> dict[tuple[str, int], list[Any]]:
    """Every episode's frames without what tells of their order in the dataset, by task and initial state."""
    rows = pq.read_table(dataset / "meta" / "episodes").to_pylist()
    frames = pq.read_table(dataset / "data").to_pylist()
    free = ("index", "episode_index")
    found = {}
    for row in rows:
        own = [frame for frame in frames if frame["episode_index"] == row["episode_index"]]
        contents = [{name: value for name, value in frame.items() if name not in free} for frame in own]
        found[row["env_task"], row["env_index"]] = [row["success"], row["final_state"], *contents]
    return found


@pytest.mark.parametrize("source", ["expert", "policy"])
def test_a_dataset_of_hosts_is_that_of_one_process(cluster: str, source: str, tmp_path: Path) -> None:
    options = [f"collect.source={source}", "collect.episodes_per_task=5", "collect.keyframes=true"]
    options += ["env.kind=faulty_env:FaultyConfig", f"env.folder={tmp_path}", "env.tasks=[reach_red]", "env.num_envs=4"]
    options += ["collect.keep=all", "policy.kind=my_policy:BinsConfig", "policy.path=null"]
    found = []
    for name, rollout in {"here": "rollout=local", "hosts": HOSTS, "killed": HOSTS}.items():
        if name == "killed":
            plant(tmp_path, pid=0, signal=signal.SIGKILL)
        values = {**RECIPE, "policy": {"kind": "my_policy:BinsConfig"}}
        recipe = read_recipe(apply_overrides(values, [*options, rollout, f"collect.dataset={tmp_path / name}"]))
        assert recipe.collect is not None
        assert collect(recipe, recipe.collect, print)["episodes"] == 5
        found.append(episodes_of(tmp_path / name))
    assert list(tmp_path.glob("taken_*")), "a host was killed"
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 5


# In place of `vla-rl`, whose start takes long: kills its parent, Ray's process, the first time, and then goes on.
PROGRAM = """
import os, pathlib, signal, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
print(sys.argv[1:], flush=True)
if sys.argv[1] == "train" and "--resume" not in sys.argv:
    folder.mkdir()
    (folder / "config.yaml").touch()
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
name = "base" if sys.argv[1] == "eval" else "final"
(folder / "evaluations").mkdir(parents=True)
(folder / "evaluations" / f"{name}.json").touch()
"""


def test_jobs_are_tasks_and_one_whose_machine_is_lost_goes_on(cluster: str, tmp_path: Path) -> None:
    program, said = tmp_path / "program.py", list[str]()
    program.write_text(PROGRAM)
    (folder := tmp_path / "sweep").mkdir()
    jobs = [
        Job(folder / name, (what, "--output", str(folder / name))) for name, what in (("a", "eval"), ("b", "train"))
    ]
    run_jobs(jobs, 2, (sys.executable, str(program)), said.append, Cluster(cluster, cpus=1, gpus=0))
    assert "it goes on elsewhere" in next(line for line in said if line.startswith("b: "))
    assert (folder / "b.log").read_text().count("'train'") == 2, "the first attempt, and one more with --resume"
    assert all(job.result.is_file() for job in jobs)
    assert not list(folder.glob(".shared-*"))
    failing = Job(folder / "c", ("eval", "--output", "c", "--fail"))
    with pytest.raises(RuntimeError, match=r"failed with exit code 1; its output is in .*c\.log"):
        run_jobs([failing], 1, ("false",), said.append, Cluster(cluster, cpus=1, gpus=0))


def test_a_sweep_of_two_trainings_on_a_cluster_ends_with_its_table(cluster: str, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "sweep"
    recipe.write_text(dump_yaml(make_recipe(save_policy(tmp_path / "policy"), "train.iterations=1")))
    command = [*VLA_RL, "sweep", str(recipe), "--over", "algo.optim.lr=1e-3,1e-2", "--output", str(folder)]
    command += ["--ray", ray.get_runtime_context().gcs_address, "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = Sweep.model_validate(json.loads((folder / RESULT_FILE).read_text()))
    assert [row.run for row in result.rows] == ["algo.optim.lr=1e-3", "algo.optim.lr=1e-2"]
    base = Evaluation.load(folder / "base-0" / "evaluations" / "base.json")
    for row in result.rows:
        after = Evaluation.load(folder / row.run / "evaluations" / "final.json")
        for mode, rate in row.rates.items():
            expected = compare(base, after).result(mode)
            assert rate == after.rate(mode).rate
            assert row.gains[mode] == (expected.difference, expected.bootstrap.low, expected.bootstrap.high)
        assert row.run.removeprefix("algo.optim.lr=") in done.stdout, "the table"
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.count("found finished") == 3


def test_what_a_cluster_cannot_run_is_refused(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_rl.rollout.actors import programs

    with pytest.raises(ConfigError, match=r"--job-cpus, --job-gpus: got 2 and 1, but no machine .* 3 CPUs and 0 GPUs"):
        programs.Programs(cluster, tmp_path, cpus=2, gpus=1)
    with pytest.raises(ConfigError, match=r"the machine .* lacks /nowhere .*; give --output, and work in, folders"):
        programs.run_here(["true"], str(tmp_path / "log"), "/nowhere/mark", 1, Setting.here())
