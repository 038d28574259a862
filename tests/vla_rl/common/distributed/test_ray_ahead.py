"""Rollouts by Ray's actors with staleness above 0: whole groups, none twice, whatever dies while the trainer works."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_env import plant, wait_until_taken
from ray_cluster import actors_at, add_node, pause_busiest, resume, three_raylets, wait_for
from tiny_run import RECIPE

from vla_rl.common.run_folder import open_run
from vla_rl.config import apply_overrides
from vla_rl.recipe.recipe import Recipe, read_recipe
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.types import Episode

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GROUPS, SIZE = 4, 4
TIMEOUT = 15  # of a host, seconds


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_raylets() as found:
        yield found


def recipe(folder: Path, *overrides: str) -> Recipe:
    """Fresh initial states, so that a group is known by its state; a policy that takes no time."""
    values = {**RECIPE, "policy": {"kind": "my_policy:BinsConfig"}, "sampling": {}}
    options = ["env.kind=faulty_env:FaultyConfig", f"env.folder={folder}", "env.tasks=[reach_red]", "env.num_envs=6"]
    options += [f"rollout={{kind: ray, hosts: 3, staleness: 1, timeout_s: {TIMEOUT}}}", "train.allow_no_success=true"]
    return read_recipe(apply_overrides(values, [*options, *overrides]))


def check_groups(episodes: list[Episode], seen: set[int], version: int) -> None:
    """Whole groups of states that never came before, and no chunk too old or from the future."""
    groups = {group: [e for e in episodes if e.group == group] for group in range(GROUPS)}
    for members in groups.values():
        assert len(members) == SIZE
        (state,) = {e.spec.index for e in members}
        assert state not in seen
        seen.add(state)
        assert len({e.chunks.actions.tobytes() for e in members}) == SIZE, "no episode stands in for another"
        for episode in members:
            assert not episode.lost
            assert episode.chunks.version is not None
            assert version - 1 <= episode.chunks.version.min() <= episode.chunks.version.max() <= version
    assert len(episodes) == GROUPS * SIZE


def test_no_group_is_short_and_none_comes_twice(cluster: Any, tmp_path: Path) -> None:
    run, seen, totals = (
        TrainingRun(recipe(tmp_path, "train.iterations=12"), tmp_path / "run", False),
        set[int](),
        Counter(),
    )

    def check(name: str) -> None:
        began = time.monotonic()
        episodes = run.roll_out()
        wait_until_taken(tmp_path)  # By an episode that is ahead, if those of this rollout were over.
        logged = run.source.metrics()
        print(name, f"{time.monotonic() - began:.1f} s", logged)
        check_groups(episodes, seen, run.iteration)
        totals.update(logged)
        run.learner.update(run.learner.prepare(episodes))
        run.iteration += 1

    def worker() -> tuple[str, int]:
        return ray.get(run.source._workers[0].actor.where.remote())  # type: ignore[attr-defined]

    with run:
        check("nothing")
        plant(tmp_path, pid=0, signal=signal.SIGKILL)
        check("host killed")
        plant(tmp_path, hang=600)
        check("host hangs")
        time.sleep(TIMEOUT + 2)  # Else its worker is killed before it notices, or tells.
        check("hang noticed")
        check("hang told")
        plant(tmp_path, pid=worker()[1], signal=signal.SIGKILL)
        check("worker killed")
        away = next(n for n in cluster.list_all_nodes() if n is not cluster.head_node and n.node_id != worker()[0])
        plant(tmp_path, pid=away.all_processes["raylet"][0].process.pid, signal=signal.SIGKILL)
        check("node killed")
        add_node(cluster)
        check("another joined")
        lost = totals["rollout/hosts_lost"] + totals["rollout/workers_lost"]
        paused = pause_busiest(cluster)
        check("raylet paused")
        check("pause told")
        assert totals["rollout/hosts_lost"] + totals["rollout/workers_lost"] > lost
        back = resume(cluster, paused)
        check("it is back")
        wait_for(lambda: actors_at(back) >= 1)
        check("the last")
        assert run.source.num_under_way == 0
    assert seen == set(range(12 * GROUPS)), "the run had the same episodes as one in which nothing broke"
    assert totals["rollout/hosts_lost"] >= 2
    assert totals["rollout/workers_lost"] >= 1
    assert totals["rollout/moved"] >= 1
    assert totals["rollout/lag_max"] >= 1


def test_a_run_cut_off_goes_on_with_what_it_had_ordered(cluster: Any, tmp_path: Path) -> None:
    class CutError(Exception):
        pass

    def cut() -> None:
        raise CutError

    plan = recipe(tmp_path, "train.iterations=3", "train.save_every=1")
    run = open_run(plan, tmp_path / "run", False)
    with pytest.raises(CutError):
        train(plan, run, on_iteration=cut)
    with TrainingRun(plan, run, resume=True) as resumed:
        assert resumed.source.num_under_way == GROUPS, "ordered ahead, before it was cut off"
        seen: set[int] = set()
        while resumed.goes_on():
            check_groups(resumed.roll_out(), seen, resumed.iteration)
            resumed.iteration += 1
        assert len(seen) == 2 * GROUPS
        assert len(seen & set(range(2 * GROUPS))) == GROUPS, "what was ordered ahead came first"
        assert resumed.source.num_under_way == 0
