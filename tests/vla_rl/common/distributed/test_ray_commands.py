"""Commands whose environments are at Ray's hosts: what they find is what they find in one process."""

# ruff: noqa: F811  (a fixture of another file)

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import three_raylets
from tiny_run import save_policy

from vla_rl.cli.options import PROGRAM
from vla_rl.config import apply_overrides
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.loop.closed_loop import loop
from vla_rl.workflows.rac import _Rounds
from vla_rl.workflows.world_model import rank_policies

sys.path.append(str(Path(__file__).parents[2] / "workflows" / "loop"))
from test_loop import recipe, started  # noqa: F401

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROLLOUTS = {"local": "rollout=local", "ray": "rollout={kind: ray, hosts: 1}"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with three_raylets() as found:
        yield found


def with_options(recipe: Recipe, *options: str) -> Recipe:
    return read_recipe(apply_overrides(recipe.model_dump(mode="json"), options))


def test_a_loop_ends_with_the_same_policy(cluster: Any, recipe: Recipe, tmp_path: Path) -> None:
    for name, rollout in ROLLOUTS.items():
        wanted = with_options(recipe, rollout, "loop.controls=[]")
        loop(wanted, started(wanted, tmp_path / name), PROGRAM, print)
    local, placed = tmp_path / "local", tmp_path / "ray"
    assert json.loads((local / "rounds.json").read_text()) == json.loads((placed / "rounds.json").read_text())
    policy = "round_1/train/policy/model.safetensors"
    assert (local / policy).read_bytes() == (placed / policy).read_bytes()
    rows = [json.loads(line) for line in (placed / "round_1/train/metrics.jsonl").read_text().splitlines()]
    assert any("rollout/seconds" in row for row in rows), "imagined at a host"


def test_a_ranking_is_the_same(cluster: Any, recipe: Recipe, tmp_path: Path) -> None:
    policies = [str(recipe.policy.path), str(save_policy(tmp_path / "other", seed=1))]
    for name, rollout in ROLLOUTS.items():
        wanted = with_options(recipe, rollout, "world_model.compare_episodes=5")
        rank_policies(wanted, recipe.env.path, policies, tmp_path / f"{name}.json", print)  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "local.json").read_text()) == json.loads((tmp_path / "ray.json").read_text())


def test_a_scripted_person_helps_at_the_same_moments(cluster: Any, tmp_path: Path) -> None:
    options = ["policy={kind: openvla, path: 'pretrained:tabletop_clean'}", "env.tasks=[stack]", "env.num_workers=0"]
    options += ["env.num_envs=2", "rac.person={alarm: progress, patience: 10}"]
    found = []
    for name, rollout in ROLLOUTS.items():
        wanted = load_recipe("tabletop_rac", [*options, rollout])
        assert wanted.rac is not None
        rounds = _Rounds(wanted, wanted.rac, tmp_path / name, print)
        specs = [EpisodeSpec("stack", "train", index) for index in range(3)]
        found.append(rounds.collect(tmp_path / name / "episodes", specs, 1, demonstrate=False))
    assert found[0] == found[1]
    assert any(outcome["intervened"] for outcome in found[0]) and not any(outcome["lost"] for outcome in found[0])
