"""Pairs of real and imagined episodes: which count, and what trust is told."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from sim.dummy import DummyConfig
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.evaluation.executed import outcomes_of_actions
from vla_rl.evaluation.results import EpisodeRecord
from vla_rl.interfaces import Policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import collect
from vla_rl.rollout.source import LocalRolloutConfig
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from vla_rl.workflows.world_model import imagined_env, paired, success_in_both
from world_model.metadata import resolve_path

MODULE = "vla_rl.workflows.world_model"


def record(index: int, success: bool = True, lost: bool = False, task: str = "stack") -> EpisodeRecord:
    return EpisodeRecord(
        mode="sampled", task=task, split="validation", index=index, sample=0, success=success, steps=1, lost=lost
    )


REAL = [record(0, False), record(1), record(2, lost=True), record(3), record(4, False)]
IMAGINED = [record(4), record(3, False, lost=True), record(2), record(1, False), record(0), record(0, task="push")]


def test_pairs_are_of_one_initial_state_and_neither_is_lost() -> None:
    assert [(start, r.success, i.success) for start, r, i in paired(REAL, IMAGINED)] == [
        ("stack/validation/0", False, True),
        ("stack/validation/1", True, False),
        ("stack/validation/4", False, True),
    ]


def test_success_in_imagination_is_of_whole_episodes_and_needs_nothing_that_changes_rewards_alone() -> None:
    options = ["ensemble=2", "action_penalty=0.1", "branch_frames=2"]
    recipe = load_recipe("tabletop_imagination", [f"env.imagination.{option}" for option in options])
    found = imagined_env(recipe, resolve_path("pretrained:tabletop")).imagination
    assert (found.action_penalty, found.ensemble) == (0, 2)
    assert found.branch_frames is None, "the value would tell of the policy that it was fitted on"


def test_an_episode_lost_in_imagination_is_no_imagined_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([SimpleNamespace(episodes=REAL), SimpleNamespace(episodes=IMAGINED)])
    monkeypatch.setattr(f"{MODULE}.evaluate", lambda *args, **kwargs: next(results))
    monkeypatch.setattr(f"{MODULE}.build_env", lambda config: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(f"{MODULE}.load_policy", lambda path, device: None)
    monkeypatch.setattr(f"{MODULE}.imagined_env", lambda recipe, path: None)
    recipe = SimpleNamespace(eval=EvalConfig(), acting_env=DummyConfig(), device="cpu", rollout=LocalRolloutConfig())
    name, starts, real, imagined = success_in_both(recipe, Path("world_model"), "policy", 5)  # type: ignore[arg-type]
    assert name == "policy" and list(starts) == [f"stack/validation/{i}" for i in (0, 1, 4)]
    assert real == [False, True, False] and imagined == [True, False, True]


class Wanderer(nn.Module, Policy):
    """Draws its actions blindly."""

    chunk_size, action_dim, cameras, uses_state = 4, 7, ("agentview",), False

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(2 * torch.rand(obs.batch_size, 4, 7, generator=generator).numpy() - 1)


def test_actions_executed_again_lead_where_they_led_and_elsewhere_from_another_state() -> None:
    specs = [EpisodeSpec("reach_red", "train", index) for index in range(24)]
    with closing(DummyConfig(tasks=("reach_red",), num_workers=0).build(5)) as env:
        episodes = collect(cast(Any, Wanderer()), env, specs, seed=0)
        outcomes = [episode.success for episode in episodes]
        assert 3 < sum(outcomes) < 21
        assert outcomes_of_actions(env, episodes) == outcomes
        moved = [replace(e, spec=other) for e, other in zip(episodes, specs[1:] + specs[:1], strict=True)]
        assert outcomes_of_actions(env, moved) != outcomes
