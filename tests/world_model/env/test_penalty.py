"""Disagreement of imagined futures, and real episodes sent where it is large: worked out by hand on the toy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_planning import Wanderer, observed, planner
from toy import SIZE, ToyInitialFrames, push, toy_world_model

from vla_rl.config import ConfigError, validate
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.env.planning import PlanConfig
from world_model.trust.measure import _signal_figures
from world_model.trust.measures.open_loop import Noise, Replay, imagine, replay
from world_model.trust.subject import OpenLoop
from world_model.types import LoggedEpisode, collate

SPECS = [EpisodeSpec("reach_back", "train", i) for i in range(4, 12)]  # Some will pass the goal.


def env_of(**options: Any) -> WorldModelEnv:
    config = ImaginationConfig.model_validate({"dual_noise": 0, "ensemble": 3, **options})
    return WorldModelEnv(toy_world_model(0.5), ToyInitialFrames(), config, len(SPECS))


def test_trust_measures_the_disagreement_that_the_environment_sees() -> None:
    env = env_of()
    obs = env.reset(SPECS)
    expected = env.step(push(0, len(SPECS), 4)).info["disagreement"]
    trust = OpenLoop(env.world_model, env.config)
    images = np.stack(list(obs.images.values()), 1)
    seeds = [env._seed_of(spec, 0) for spec in SPECS]
    context = trust.begin(trust.encode(images[:, None], obs.state[:, None]), obs.instruction, seeds)
    _, scores = trust.imagine(context, env.world_model.actions(push(0, len(SPECS), 4), np.full(len(SPECS), 4)))
    np.testing.assert_allclose(cast(np.ndarray, scores.disagreement)[:, 0], expected, rtol=1e-6)
    alone = OpenLoop(env.world_model, ImaginationConfig(dual_noise=0))
    context = alone.begin(alone.encode(images[:, None], obs.state[:, None]), obs.instruction, seeds)
    _, scores = alone.imagine(context, env.world_model.actions(push(0, len(SPECS), 4), np.full(len(SPECS), 4)))
    assert scores.disagreement is None


def test_what_is_usual_is_of_frames_that_the_environment_would_imagine() -> None:
    """After the horizon nothing is compared, which is no agreement."""
    whole, ended = (
        OpenLoop(toy_world_model(0.5), ImaginationConfig(dual_noise=0, ensemble=3, horizon=horizon))
        for horizon in (None, 4)
    )
    episode = LoggedEpisode(
        images=np.full((4, 2, SIZE, SIZE, 3), 16, np.uint8),
        states=np.zeros((4, 2), np.float32),
        actions=np.zeros((4, 4, 3), np.float32),
        executed=np.arange(4)[:, None].repeat(4, 1) > 0,
        success=np.zeros(4, bool),
        instruction="reach the goal",
        start="reach/train/0",
    )
    batch = collate([episode])
    first = whole.encode(batch.images[:, :1], batch.states[:, :1])
    _, scores = imagine(whole, batch, first, Noise(0).of([0]))
    found = [cast(np.ndarray, replay(one, [episode], 1, Noise(0)).disagreement) for one in (whole, ended)]
    assert found[0] == pytest.approx(cast(np.ndarray, scores.disagreement).mean())
    assert found[1] == pytest.approx(cast(np.ndarray, scores.disagreement)[0, 0])


def test_trust_says_whether_disagreement_is_where_verdicts_are_wrong() -> None:
    real, imagined = np.array([[True], [False], [True], [False]]), np.array([[True], [True], [False], [False]])
    spread = np.array([0.1, 0.5, 0.4, 0.2])
    done = Replay({}, real, imagined, np.linspace(0, 1, 4), real[:, 0], np.linspace(0, 1, 4), None, None, spread)
    found = _signal_figures(done, np.arange(4), {})
    assert found["disagreement"].value == pytest.approx(0.3) and found["disagreement_auc"].value == 1
    rare = replace(done, imagined=np.array([[True], [True], [True], [False]]))
    assert _signal_figures(rare, np.arange(4), {})["disagreement_auc"].of.startswith("episodes with a wrong verdict")
    without = Replay({}, real, imagined, np.linspace(0, 1, 4), real[:, 0], np.linspace(0, 1, 4), None)
    assert "disagreement" not in _signal_figures(without, np.arange(4), {})


def test_a_bonus_sends_the_policy_where_futures_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {}
    for bonus in (0.0, 0.01, 50.0):
        policy = Wanderer()
        plan = planner(monkeypatch, policy, candidates=5, chunks=1, bonus=bonus)
        dynamics = plan.world_model.dynamics
        move = dynamics.imagine

        def unsure_of_small_pushes(context, actions, noise, num_steps=None, move=move):
            frames = move(context, actions, noise)
            still = (1 - actions.values[:, :, 0, 0])[:, :, None, None, None, None]
            drawn = noise.normal(1).view(-1, 1, 1, 1, 1, 1)
            return type(frames)(frames.latents + 1e-3 * still * drawn, frames.states)

        monkeypatch.setattr(dynamics, "imagine", unsure_of_small_pushes)
        plan.watch([0, 1], [True, True], ["reach"] * 2)
        chunk = plan.act(observed([1.0, 2.0]), torch.Generator().manual_seed(0))
        drawn = policy.drawn[0].reshape(2, 5)
        chosen[bonus] = chunk.actions[:, 0, 0]
    np.testing.assert_array_equal(chosen[0.0], drawn.max(1))
    np.testing.assert_array_equal(chosen[0.01], drawn.max(1), "a small bonus decides between likes")
    np.testing.assert_array_equal(chosen[50.0], drawn.min(1))


def test_a_bonus_and_a_plan_to_collect_by_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(ConfigError, match=r"plan\.bonus: got 1 with choose 'random'"):
        validate(PlanConfig, {"world_model": "x", "choose": "random", "bonus": 1})
    plan = {"world_model": "x", "bonus": 1}
    with pytest.raises(ConfigError, match=r"collect\.plan: only for real episodes of the policy"):
        validate(CollectConfig, {"source": "expert", "plan": plan})
    with pytest.raises(ConfigError, match=r"collect\.temperature: got 0\.5 with collect\.plan"):
        validate(CollectConfig, {"source": "policy", "plan": plan, "temperature": 0.5})
    assert validate(CollectConfig, {"source": "policy", "plan": plan, "temperature": 0}).temperature == 0
    config = validate(CollectConfig, {"source": "policy", "plan": plan})
    assert isinstance(config.plan, PlanConfig) and "bonus of 1" in config.plan.protocol()
