"""Rollouts by Ray's actors when it is the training process that breaks, or Ray's memory that is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from launching import launch
from ray_cluster import three_raylets
from test_ray_lockstep import run_of, same
from tiny_run import RECIPE, metrics

from vla_rl.common.run_folder import open_run
from vla_rl.config import apply_overrides
from vla_rl.recipe.recipe import read_recipe
from vla_rl.training.run import TrainingRun

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).resolve().parent
GROUPS, SIZE, ITERATIONS = 4, 4, 5
STORE_MB = 80  # About as little as Ray takes.
LARGE = ("env.image_size=512", "env.horizon=16", "train.iterations=2", "train.groups=12")


def values(*overrides: str) -> dict[str, Any]:
    """Fresh initial states, so that a group is known by its state; a policy that takes no time."""
    base = {**RECIPE, "policy": {"kind": "my_policy:BinsConfig"}, "sampling": {}}
    options = [f"train.iterations={ITERATIONS}", "train.save_every=2", "train.allow_no_success=true", "env.num_envs=6"]
    return apply_overrides(base, [*options, *overrides])


def faulty(folder: Path, *overrides: str) -> dict[str, Any]:
    """The same, with an environment that kills whom it is told to."""
    return values(
        "env.kind=faulty_env:FaultyConfig",
        f"env.folder={folder}",
        "env.tasks=[reach_red]",
        "env.num_envs=6",
        *overrides,
    )


def command(recipe: dict[str, Any], folder: Path, kill_after: int) -> int:
    """Run it in a process of its own; returns how it ended."""
    folder.parent.mkdir(exist_ok=True)
    file = folder.parent / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    arguments = [str(HERE / "killed_run.py"), str(file), str(folder), str(kill_after)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *arguments], env=environment, timeout=600, check=False).returncode


def killed_and_resumed(recipe: dict[str, Any], folder: Path, faults: Path) -> None:
    """Kill the training process in the rollout after its third iteration, which no checkpoint has; then resume."""
    assert command(recipe, folder, kill_after=3) == -signal.SIGKILL
    (taken,) = faults.glob("taken_*")
    host, deadline = int(taken.name.removeprefix("taken_")), time.monotonic() + 60
    while Path(f"/proc/{host}").exists():
        assert time.monotonic() < deadline, "a host lived on after the training process was killed"
        time.sleep(0.2)
    assert command(recipe, folder, kill_after=0) == 0


def test_a_killed_trainer_resumes_to_the_bit(tmp_path: Path) -> None:
    local = run_of(read_recipe(faulty(tmp_path)), tmp_path / "local")
    placed = tmp_path / "ray" / "run"
    killed_and_resumed(faulty(tmp_path, "rollout={kind: ray, hosts: 2}"), placed, tmp_path)
    for alone, beside in zip(metrics(local), metrics(placed), strict=True):
        assert alone == {name: beside[name] for name in alone}
    for file in sorted((local / "policy").iterdir()):
        assert file.read_bytes() == (placed / "policy" / file.name).read_bytes(), file.name


def test_a_killed_trainer_loses_no_group_and_learns_from_none_twice(tmp_path: Path) -> None:
    with three_raylets() as cluster:
        address = f"rollout={{kind: ray, hosts: 2, staleness: 2, address: '{cluster.address}'}}"
        killed_and_resumed(faulty(tmp_path, address), tmp_path / "ray" / "run", tmp_path)
    lines = (tmp_path / "ray" / "run" / "learned.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 3, 4, 5], "the third was in no checkpoint"
    learned = {row["iteration"]: row["episodes"] for row in rows}
    states = []
    for episodes in learned.values():
        for group in range(GROUPS):
            members = [state for number, state in episodes if number == group]
            assert len(members) == SIZE and len(set(members)) == 1, "a group is whole, and from one state"
            states.append(members[0])
    assert sorted(states) == list(range(ITERATIONS * GROUPS)), "each state once, as in a run that was not killed"
    logged = metrics(tmp_path / "ray" / "run")
    assert [row["train/episodes"] + row["train/lost"] for row in logged] == [GROUPS * SIZE] * ITERATIONS


def test_two_trainers_killed_and_resumed_learn_from_each_group_once(tmp_path: Path) -> None:
    """Each has workers of its own, and groups under way of its own, in one cluster."""
    folder, file = tmp_path / "run", tmp_path / "recipe.yaml"
    with three_raylets() as cluster:
        rollout = f"rollout={{kind: ray, hosts: 1, host_cpus: 0.5, staleness: 1, address: '{cluster.address}'}}"
        file.write_text(yaml.safe_dump(faulty(tmp_path, rollout)))
        killed = launch(str(HERE / "killed_run.py"), str(file), str(folder), "3")
        assert killed.returncode != 0 and "SIGKILL" in killed.stderr, killed.stdout[-1500:] + killed.stderr[:4000]
        again = launch(str(HERE / "killed_run.py"), str(file), str(folder), "0")
        assert again.returncode == 0, again.stdout[-1500:] + again.stderr[:4000]
        alone = subprocess.run(
            [sys.executable, str(HERE / "killed_run.py"), str(file), str(folder), "0"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert alone.returncode == 0, "at the end nothing is under way"
    learned: dict[int, list[int]] = {}
    for name in ("learned.jsonl", "learned-1.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for iteration, episodes in {row["iteration"]: row["episodes"] for row in rows}.items():
            assert len(episodes) == GROUPS * SIZE // 2, "half of the groups each"
            learned.setdefault(iteration, []).extend(state for _, state in episodes[::SIZE])
    assert sorted(learned) == list(range(1, ITERATIONS + 1))
    states = sorted(state for found in learned.values() for state in found)
    assert states == list(range(ITERATIONS * GROUPS)), "each state once, as in a run that was not killed"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_full_store_and_a_full_disk_say_what_to_do(
    staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.01")  # Of the disk: Ray writes no file any more.
    rollout = {"kind": "ray", "hosts": 2, "staleness": staleness, "object_store_mb": STORE_MB}
    recipe = read_recipe(values(*LARGE) | {"rollout": rollout})
    with (
        TrainingRun(recipe, open_run(recipe, tmp_path / "run", False), resume=False) as run,
        pytest.raises(RuntimeError, match=r"object store is full, .*raise rollout\.object_store_mb, or make"),
    ):
        run.roll_out()


@pytest.mark.parametrize("staleness", [0, 1])
def test_more_episodes_than_the_object_store_holds(staleness: int, tmp_path: Path) -> None:
    plain = values(*LARGE)
    rollout = {"kind": "ray", "hosts": 2, "staleness": staleness, "object_store_mb": STORE_MB}
    alone, beside = read_recipe(plain), read_recipe(plain | {"rollout": rollout})
    local = TrainingRun(alone, open_run(alone, tmp_path / "local", False), resume=False)
    placed = TrainingRun(beside, open_run(beside, tmp_path / "ray", False), resume=False)
    states: list[int] = []
    with local, placed:
        for _ in range(2):
            found = placed.roll_out()
            size = sum(image.nbytes for episode in found for image in episode.obs.images.values())
            assert size > STORE_MB * 2**20, "else nothing is tested"
            assert len(found) == 12 * SIZE
            states += [episode.spec.index for episode in found[::SIZE]]
            assert [episode.spec.index for episode in found] == np.repeat(states[-12:], SIZE).tolist()
            if staleness == 0:
                assert all(same(mine, theirs) for mine, theirs in zip(local.roll_out(), found, strict=True))
            placed.iteration, local.iteration = placed.iteration + 1, local.iteration + 1
    assert sorted(states) == list(range(24))
