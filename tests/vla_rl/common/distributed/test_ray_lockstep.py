"""Rollouts by Ray's actors with staleness 0: the numbers of one process, to the bit, whatever dies meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_env import plant
from ray_cluster import actors_at, add_node, pause_busiest, resume, three_raylets
from tiny_run import RECIPE, make_recipe, metrics, save_policy

from vla_rl.common.run_folder import open_run
from vla_rl.config import apply_overrides
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.types import Episode
from vla_rl.workflows.evaluate_policy import evaluate

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_raylets() as found:
        yield found


def same(a: Episode, b: Episode) -> bool:
    arrays = ("reward", "terminated", "truncated", "num_steps")
    return (
        a.spec == b.spec
        and (a.group, a.success, a.lost) == (b.group, b.success, b.lost)
        and np.array_equal(a.chunks.actions, b.chunks.actions)
        and np.array_equal(a.chunks.log_prob, b.chunks.log_prob)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)
        and all(np.array_equal(image, b.obs.images[name]) for name, image in a.obs.images.items())
    )


def run_of(recipe: Recipe, folder: Path) -> Path:
    run = open_run(recipe, folder, False)
    train(recipe, run, False)
    return run


def test_a_tabletop_run_equals_the_local_one(cluster: Any, tmp_path: Path) -> None:
    small = ["env.num_envs=6", "env.num_workers=0", "train.groups=2", "train.group_size=3", "train.iterations=2"]
    small += [
        "train.evaluate=never",
        "train.save_every=1",
        "log.tensorboard=false",
        "log.console=false",
        "num_threads=1",
    ]
    local = run_of(load_recipe("tabletop_grpo", small), tmp_path / "local")
    placed = run_of(load_recipe("tabletop_grpo", [*small, "rollout={kind: ray, hosts: 3}"]), tmp_path / "ray")
    for alone, beside in zip(metrics(local), metrics(placed), strict=True):
        assert alone == {name: beside[name] for name in alone}
    for file in ("model.safetensors", "config.json"):
        assert (local / "policy" / file).read_bytes() == (placed / "policy" / file).read_bytes()


def test_an_evaluation_at_hosts_equals_the_local_one(cluster: Any, tmp_path: Path) -> None:
    options = ["policy.kind=my_policy:BinsConfig", "eval.episodes_per_task=6", "eval.videos=1"]
    recipe = {**RECIPE, "policy": {"kind": "my_policy:BinsConfig"}}
    found = []
    for name, rollout in {"local": "rollout=local", "ray": "rollout={kind: ray, hosts: 3}"}.items():
        run = open_run(read_recipe(apply_overrides(recipe, [*options, rollout])), tmp_path / name, False)
        found.append(evaluate(read_recipe(apply_overrides(recipe, [*options, rollout])), run))
        assert list(run.glob("videos/*.mp4"))
    local, placed = found
    assert local.episodes == placed.episodes
    assert local.meta.env_config == placed.meta.env_config


def test_nothing_that_breaks_changes_an_episode(cluster: Any, tmp_path: Path) -> None:
    options = ["env.kind=faulty_env:FaultyConfig", f"env.folder={tmp_path}", "num_threads=1", "train.iterations=10"]
    policy = save_policy(tmp_path / "base")
    local = TrainingRun(make_recipe(policy, *options), tmp_path / "local", resume=False)
    rollout = "rollout={kind: ray, hosts: 3, timeout_s: 15}"
    placed = TrainingRun(make_recipe(policy, *options, rollout), tmp_path / "ray", resume=False)

    def check(name: str, at_least: dict[str, float]) -> None:
        began = time.monotonic()
        found = placed.roll_out()
        logged = placed.source.metrics()
        print(name, f"{time.monotonic() - began:.1f} s", logged)
        (tmp_path / "fault.json").unlink(missing_ok=True)  # The local run is spared.
        for mine, theirs in zip(local.roll_out(), found, strict=True):
            assert same(mine, theirs), name
            assert np.array_equal(theirs.chunks.version, [local.iteration] * theirs.num_chunks)
        for key, least in at_least.items():
            assert logged[key] >= least, (name, logged)
        local.iteration, placed.iteration = local.iteration + 1, placed.iteration + 1

    with local, placed:
        check("nothing", {})
        plant(tmp_path, pid=0, signal=signal.SIGKILL)
        check("host killed", {"rollout/hosts_lost": 1, "rollout/moved": 1})
        plant(tmp_path, hang=600)
        check("host hangs", {"rollout/hosts_lost": 1, "rollout/moved": 1, "rollout/stood_s": 10})
        plant(tmp_path, pid=0, signal=signal.SIGSTOP)
        check("host paused", {"rollout/hosts_lost": 1})
        node, worker = ray.get(placed.source._workers[0].where.remote())  # type: ignore[attr-defined]
        plant(tmp_path, pid=worker, signal=signal.SIGKILL)
        check("worker killed", {"rollout/workers_lost": 1, "rollout/redone": 16})
        node, _ = ray.get(placed.source._workers[0].where.remote())  # type: ignore[attr-defined]
        away = next(n for n in cluster.list_all_nodes() if n is not cluster.head_node and n.node_id != node)
        raylet = away.all_processes["raylet"][0].process.pid
        plant(tmp_path, pid=raylet, signal=signal.SIGKILL)
        check("node killed", {})
        add_node(cluster)
        check("node joined", {})
        paused = pause_busiest(cluster)
        check("raylet paused", {})
        lost = placed.source.metrics()
        assert (
            lost["rollout/hosts_lost"] + lost["rollout/workers_lost"]
            >= 1
            <= lost["rollout/moved"] + lost["rollout/redone"]
        )
        back = resume(cluster, paused)
        check("it is back", {})
        assert actors_at(back) >= 1, "it serves"
