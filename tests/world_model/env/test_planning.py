"""Best of N in a world that can be worked out by hand: what is chosen, what is remembered, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from toy import METADATA, toy_env, toy_valued, toy_world_model

from vla_rl.common.row_noise import by_row
from vla_rl.config import ConfigError, validate
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import collect
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from world_model.env import planning
from world_model.env.planning import PlanConfig, Planner

SPECS = [EpisodeSpec("reach", "train", i) for i in range(12)]


class Wanderer(torch.nn.Module, Policy):
    """Pushes ahead by as much as it draws, once for a chunk; greedily not at all."""

    chunk_size, action_dim, cameras, uses_state = 4, 3, ("wrist",), True

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[np.ndarray] = []

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, 4, 3), np.float32)
        if temperature:
            actions[..., 0] = torch.rand(obs.batch_size, 1, generator=generator).numpy()
            self.drawn.append(actions[:, 0, 0])
        return ActionChunk(actions)


def planner(monkeypatch: pytest.MonkeyPatch, policy: Any = None, **options: Any) -> Planner:
    monkeypatch.setattr(planning, "load_world_model", lambda path, device: toy_world_model())
    return PlanConfig.model_validate({"world_model": "toy", **options}).build(policy or cast(Any, Wanderer()))


def observed(positions: list[float]) -> Observation:
    images = (8 * np.array(positions))[:, None, None, None] * np.ones((8, 8, 3))
    state = np.stack([np.array(positions), np.zeros(len(positions))], 1).astype(np.float32)
    return Observation(
        {c: images.astype(np.uint8) for c in METADATA.cameras}, state, ["reach the goal"] * len(positions)
    )


def test_the_candidate_that_gets_furthest_is_chosen(monkeypatch) -> None:
    policy = Wanderer()
    plan = planner(monkeypatch, policy, candidates=5)
    plan.watch([3, 0], [True, True], ["reach"] * 2)
    chunk = plan.act(observed([1.0, 2.0]), torch.Generator().manual_seed(0))
    drawn = policy.drawn[0].reshape(2, 5)
    np.testing.assert_array_equal(chunk.actions[:, 0, 0], drawn.max(1))
    assert len(policy.drawn) == 1, "what follows a candidate is imagined greedily"
    assert plan.num_decisions == 2 and plan.latency()["decision_ms"] > 0


def test_the_first_candidate_of_a_greedy_evaluation_is_the_greedy_chunk(monkeypatch) -> None:
    plan = planner(monkeypatch, candidates=1)
    plan.watch([0], [True], ["reach"])
    assert not plan.act(observed([1.0]), torch.Generator().manual_seed(0), temperature=0.0).actions.any()


def test_it_remembers_each_episode_as_it_went(monkeypatch) -> None:
    """Real observations with the executed chunks; environments come, go, and begin anew."""
    plan = planner(monkeypatch, candidates=2)
    generator = torch.Generator().manual_seed(0)
    plan.watch([0, 2], [True, True], ["reach"] * 2)
    plan.act(observed([1.0, 2.0]), generator)
    plan.watch([2], [False], ["reach"])
    plan.act(observed([3.5]), generator)
    plan.watch([0, 1, 2], [False, True, False], ["reach"] * 3)
    plan.act(observed([1.5, 5.0, 4.0]), generator)
    memory = plan._memory
    assert memory is not None
    assert memory.tensors()["context.position"][:, 0].tolist() == [1.5, 5.0, 4.0]
    recent = memory.recent.latents[:, :, 0, 0, 0, 0]
    assert recent.tolist() == [[1.0, 1.0, 1.5], [5.0, 5.0, 5.0], [2.0, 3.5, 4.0]]
    assert memory.reference.latents[:, 0, 0, 0, 0, 0].tolist() == [1.0, 5.0, 2.0]


def test_planning_solves_what_chance_does_not(monkeypatch) -> None:
    """In the very world it imagines: six frames, of which the policy's draws need about eight."""
    solved = {}
    for name, options in (("best", {}), ("random", {"choose": "random"})):
        plan = planner(monkeypatch, candidates=8, **options)
        episodes = collect(cast(Any, plan), toy_env(5, dual_noise=0), SPECS, seed=1)
        solved[name] = sum(e.success for e in episodes)
        again = planner(monkeypatch, candidates=8, **options)
        repeated = collect(cast(Any, again), toy_env(5, dual_noise=0), SPECS, seed=1)
        assert [e.success for e in repeated] == [e.success for e in episodes]
    assert solved["best"] >= solved["random"] + 6


class OwnNoise(Wanderer):
    """Draws each row by that row's own generator."""

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, 4, 3), np.float32)
        drawn = by_row(lambda shape, own: torch.rand(shape, generator=own), (obs.batch_size, 1), generator)
        actions[..., 0] = drawn.numpy() * temperature
        return ActionChunk(actions)


@pytest.mark.parametrize("choose", ["best", "random"])
def test_an_episode_is_planned_the_same_whatever_runs_beside_it(monkeypatch, choose: str) -> None:
    """As without planning: else an episode run again after a broken worker, or filmed, would be another one."""
    monkeypatch.setattr(planning, "load_world_model", lambda path, device: toy_world_model(noise=2.0))

    def acted(num_envs: int, numbers: Sequence[int]) -> list[np.ndarray]:
        config = PlanConfig.model_validate({"world_model": "toy", "candidates": 4, "choose": choose})
        specs, seeds = [SPECS[i] for i in numbers], [100 + i for i in numbers]
        plan = config.build(cast(Any, OwnNoise()))
        return [e.chunks.actions for e in collect(cast(Any, plan), toy_env(num_envs), specs, seed=seeds)]

    together = acted(5, range(8))
    for number in (6, 2):
        np.testing.assert_array_equal(acted(1, [number])[0], together[number])


def test_the_value_judges_the_last_imagined_frame_with_the_time_that_is_left_there(monkeypatch) -> None:
    """In the toy its logit is 2 (position - 6 + 4 left / 24 - 2) before calibration's slope of 2, which ranks alike."""
    policy = Wanderer()
    monkeypatch.setattr(planning, "load_world_model", lambda path, device: toy_valued())
    plan = PlanConfig.model_validate({"world_model": "toy", "candidates": 3, "judge": "value"}).build(cast(Any, policy))
    assert isinstance(plan, Planner) and "by its value" in plan.config.protocol()
    asked: list[tuple[int, list[int]]] = []
    valued = plan.world_model.value_logits

    def watched(memory: Any, frames: Any, steps_left: Any) -> torch.Tensor:
        asked.append((frames.states.shape[1], steps_left[:, -1].tolist()))
        return valued(memory, frames, steps_left)

    monkeypatch.setattr(plan.world_model, "value_logits", watched)
    plan.watch([3, 0], [True, True], ["reach"] * 2)
    plan.act(observed([1.0, 2.0]), torch.Generator().manual_seed(0))
    plan.watch([0, 1], [False, True], ["reach", "reach_back"])
    chunk = plan.act(observed([3.0, 2.0]), torch.Generator().manual_seed(1))
    np.testing.assert_array_equal(chunk.actions[:, 0, 0], policy.drawn[1].reshape(2, 3).max(1))
    assert asked == [(1, [16] * 6), (1, [12] * 3 + [8] * 3)], "of 24 steps, and 16, after two more chunks of 4"
    with pytest.raises(ConfigError, match="no value"):
        planner(monkeypatch, judge="value")


def test_what_does_not_fit_is_refused(monkeypatch) -> None:
    policy = Wanderer()
    policy.chunk_size = 8  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"frames of 4 control steps, the policy decides every 8"):
        planner(monkeypatch, policy)
    policy = Wanderer()
    policy.cameras = ("front",)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"shows \['agentview', 'wrist'\], the policy also reads \['front'\]"):
        planner(monkeypatch, policy)
    policy = Wanderer()
    policy.action_dim = 7  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"a robot with actions of 3 numbers, the policy's have 7"):
        planner(monkeypatch, policy)
    plan, seen = planner(monkeypatch), observed([1.0])
    plan.watch([0], [True], ["reach"])
    with pytest.raises(ValueError, match=r"the environment does not show \['wrist'\]; set env.cameras"):
        plan.act(replace(seen, images={"agentview": seen.images["agentview"]}))
    with pytest.raises(ValueError, match=r"images .* of \(8, 8\) and states of 2 .* shows \(8, 8\) and 3"):
        plan.act(replace(seen, state=np.zeros((1, 3), np.float32)))
    plan = planner(monkeypatch)
    with pytest.raises(ValueError, match="got 1 observations and knows of 0 episodes; call watch first"):
        plan.act(observed([1.0]))
    with pytest.raises(ConfigError, match=r"plan\.candidats: unknown key.*Did you mean 'candidates'"):
        validate(EvalConfig, {"plan": {"world_model": "x", "candidats": 3}}, prefix="eval")
    with pytest.raises(ConfigError, match=r"eval\.temperatures: got 0\.7 with eval\.plan, which draws"):
        validate(EvalConfig, {"plan": {"world_model": "x"}, "temperatures": [0, 0.7]}, prefix="eval").modes()
    config = validate(EvalConfig, {"plan": {"world_model": "x", "candidates": 3}})
    assert validate(EvalConfig, config.model_dump(mode="json")) == config and isinstance(config.plan, PlanConfig)
