"""Imagination at Ray's hosts: the episodes that one process imagines, also where they are imagined ahead of time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imagined_together import OPTIONS
from ray_cluster import three_raylets
from test_ray_lockstep import same
from tiny_run import make_recipe, metrics

from vla_rl.common.run_folder import open_run
from vla_rl.interfaces import TrustError
from vla_rl.recipe.recipe import Recipe
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train
from vla_rl.types import Episode

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BASE = Path("pretrained:tabletop_base")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_raylets() as found:
        yield found


class CutError(Exception):
    """The run is over half way."""


def cut() -> None:
    raise CutError


def recipe(*overrides: str) -> Recipe:
    return make_recipe(BASE, *OPTIONS, "train.iterations=2", *overrides)


def test_a_run_in_imagination_equals_the_local_one(cluster: Any, tmp_path: Path) -> None:
    """Batches of one size: to the bit, resumed half way."""
    own = ("train.temperature=1", "algo.filter_groups=false")
    runs = {"local": "rollout=local", "ray": "rollout={kind: ray, hosts: 1}"}
    for name, rollout in runs.items():
        wanted = recipe(*own, rollout)
        with pytest.raises(CutError):
            train(wanted, open_run(wanted, tmp_path / name, False), False, on_iteration=cut)
        train(wanted, open_run(wanted, tmp_path / name, True), True)
    for alone, beside in zip(metrics(tmp_path / "local"), metrics(tmp_path / "ray"), strict=True):
        assert alone == {name: beside[name] for name in alone}
    for file in ("policy/model.safetensors", "admission.json"):
        assert (tmp_path / "local" / file).read_bytes() == (tmp_path / "ray" / file).read_bytes(), file


def two_rollouts(wanted: Recipe, folder: Path) -> list[Episode]:
    folder.mkdir()
    with TrainingRun(wanted, folder, resume=False) as run:
        episodes = run.roll_out()
        run.iteration += 1
        return episodes + run.roll_out()


@pytest.mark.parametrize("staleness", [0, 1])
def test_several_hosts_imagine_the_same_but_for_rounding(staleness: int, cluster: Any, tmp_path: Path) -> None:
    def found(name: str, rollout: str) -> dict[tuple[int, Any], np.ndarray]:
        episodes = two_rollouts(recipe(rollout), tmp_path / name)
        return {(e.spec.index, e.spec.place): np.concatenate([e.obs.state, e.final_obs.state]) for e in episodes}

    local = found("local", "rollout=local")
    placed = found("ray", f"rollout={{kind: ray, hosts: 3, staleness: {staleness}}}")
    assert len(local) == 12 and placed.keys() == local.keys()
    for key, states in local.items():
        np.testing.assert_allclose(placed[key], states, atol=1e-5)
    ends = [states[-1] for states in local.values()]
    assert min(np.abs(a - b).max() for i, a in enumerate(ends) for b in ends[:i]) > 3e-5, "each has noise of its own"


def test_a_host_that_is_gone_changes_no_imagined_episode(cluster: Any, tmp_path: Path) -> None:
    local = two_rollouts(recipe("rollout=local"), tmp_path / "local")
    wanted = recipe("rollout={kind: ray, hosts: 1}")
    (tmp_path / "ray").mkdir()
    with TrainingRun(wanted, tmp_path / "ray", resume=False) as run:
        episodes = run.roll_out()
        run.iteration += 1
        os.kill(host_process(), signal.SIGKILL)
        episodes += run.roll_out()
        assert run.source.metrics()["rollout/hosts_lost"] == 1
    assert all(same(mine, theirs) for mine, theirs in zip(local, episodes, strict=True))


def host_process() -> int:
    """The one that holds environments."""
    (found,) = [
        int(place.name)
        for place in Path("/proc").iterdir()
        if place.name.isdecimal() and (place / "cmdline").read_bytes().startswith(b"ray::EnvHost")
    ]
    return found


def test_trust_is_asked_for_before_anything_starts(tmp_path: Path) -> None:
    wanted = recipe("rollout={kind: ray, hosts: 1}", "env.trust.ignore=false", "env.trust.report=nowhere.json")
    with pytest.raises(TrustError, match=r"nowhere\.json"):
        TrainingRun(wanted, tmp_path, resume=False)
