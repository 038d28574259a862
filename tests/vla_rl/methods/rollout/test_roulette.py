"""Roulette for hopeless episodes: thresholds and steps by hand, an unchanged expectation, and a whole source."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy
from torch import nn

from sim.dummy import DummyConfig
from vla_rl.common.distributed.process_group import ALONE
from vla_rl.common.progress import Stopwatch
from vla_rl.config import ConfigError
from vla_rl.methods.rollout import roulette
from vla_rl.methods.rollout.roulette import Probe, RouletteConfig, RouletteEnv, Told, chosen_threshold, fitted, measured
from vla_rl.rollout.source import GroupOrder, LocalRolloutConfig
from vla_rl.types import EpisodeSpec, Observation, StepResult

HORIZON = 6
KNOWS = Probe([0.0], [1.0], [0.0, 0.0, 1.0, 0.0], threshold=0.5)  # Hopeless: the embedding is below 0.


@pytest.mark.parametrize(
    ("weights", "share", "threshold"),
    [
        ([1] * 18, 0.05, 0.0),  # A fresh one is the least of 19 too often.
        ([1] * 19, 0.05, 1.0),  # The least: 1 of 20.
        ([1] * 39, 0.05, 2.0),  # The second least: 2 of 40.
        ([1] * 19, 0.25, 5.0),  # 5 of 20.
        ([1, 3, 1, 1, 1, 1, 1], 0.5, 3.0),  # The fresh one, 1 and 3, of 10.
    ],
)
def test_threshold_by_hand(weights: list[float], share: float, threshold: float):
    order = np.random.default_rng(0).permutation(len(weights))
    assert chosen_threshold(1.0 + np.arange(len(weights))[order], np.array(weights)[order], share) == threshold


def test_no_more_successes_fall_below_than_allowed():
    """Over fresh draws of 59 successes, the share of a fresh one's that lie below is 3 of 60 on average."""
    rng = np.random.default_rng(0)
    below = [chosen_threshold(rng.random(59), np.ones(59), 0.05) for _ in range(2000)]  # Uniform: its own share.
    assert np.mean(below) == pytest.approx(0.05, abs=0.003)


class Signs:
    """Environment i shows the sign of its number modulo 2; even ones never succeed but for one in four."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.spec = num_envs, SimpleNamespace(horizon={"go": HORIZON})
        self.steps = np.zeros(num_envs, int)

    def reset(self, specs, env_ids=None):
        self.steps[env_ids] = 0
        return self.seen(env_ids)

    def seen(self, ids):
        sign = np.where(np.asarray(ids) % 2, 1.0, -1.0)[:, None]
        return Observation({}, sign.astype(np.float32), ["go"] * len(sign))

    def step(self, actions, env_ids=None):
        ids, size = np.asarray(env_ids), actions.shape[1]
        self.steps[ids] += size
        last = (self.steps[ids] == HORIZON)[:, None] & (np.arange(size) == size - 1)
        won = last & ((ids % 2 == 1) | (ids % 8 == 0))[:, None]
        num, lost = np.full(len(ids), size), np.zeros(len(ids), bool)
        return StepResult(self.seen(ids), won.astype(np.float32), won, last & ~won, num, won.any(1), lost)


def played(num_envs: int, probe: Probe | None = KNOWS, going_on: float = 0.25) -> RouletteEnv:
    env = RouletteEnv(Signs(num_envs), going_on)  # pyright: ignore[reportArgumentType]
    env.probe, env.policy = probe, SimpleNamespace(embed=lambda obs: torch.from_numpy(obs.state))  # pyright: ignore
    env.reset([EpisodeSpec("go")] * num_envs)
    return env


def test_a_step_by_hand():
    env = played(4)
    env.rng = SimpleNamespace(random=lambda n: np.array([0.1, 0.9, 0.9, 0.1]))  # pyright: ignore[reportAttributeAccessIssue]
    result = env.step(np.zeros((4, 2, 1), np.float32))
    assert result.truncated.tolist() == [[False, False], [False, False], [False, True], [False, False]]
    assert result.info["roulette/weight"].tolist() == [4, 1, 0, 1]  # Hopeless: 0, which goes on, and 2.
    assert np.stack(result.info["roulette/seen"]).tolist() == [[s, pytest.approx(1 / 3)] for s in (-1, 1, -1, 1)]
    env.rng = SimpleNamespace(random=lambda n: np.full(n, 0.9))  # pyright: ignore[reportAttributeAccessIssue]
    result = env.step(np.zeros((3, 2, 1), np.float32), [0, 1, 3])
    assert not result.done.any(), "roulette is played once"
    assert np.isnan(result.info["roulette/seen"][0]).all() and not np.isnan(result.info["roulette/seen"][1]).any()
    result = env.step(np.zeros((3, 2, 1), np.float32), [0, 1, 3])
    assert result.reward.tolist() == [[0, 4], [0, 1], [0, 1]] and result.success.all()


def test_rewards_keep_their_expectation():
    """A quarter of what the probe calls hopeless succeeds all the same, which it pays 4 times in a quarter of cases."""
    totals, steps = np.zeros(800), 0
    for _ in range(40):
        env = played(800)
        env.rng, going = np.random.default_rng(steps), np.arange(800)
        while len(going):
            result = env.step(np.zeros((len(going), 2, 1), np.float32), going)
            totals[going] += result.reward.sum(1)
            steps += int(result.num_steps.sum())
            going = going[~result.done]
    mean = totals.reshape(-1, 8).mean(0) / 40
    assert mean == pytest.approx([1, 1, 0, 1, 0, 1, 0, 1], abs=0.06)
    assert steps / (40 * 800) == pytest.approx(0.5 * 6 + 0.5 * (0.25 * 6 + 0.75 * 2), rel=0.02)


def test_the_probe_learns_from_what_it_is_told():
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(200, 3)).astype(np.float32)
    told = [Told(row[None], bool(row[0] > 0), 1.0, fits=True) for row in seen]
    probe = fitted(told, None)
    assert ((probe.probability(seen) > 0.5) == (seen[:, 0] > 0)).mean() > 0.95
    again = fitted([Told(seen[:1], True, 0.0, fits=True)], probe)  # What weighs nothing moves nothing.
    np.testing.assert_allclose(again.weights, probe.weights, atol=1e-3)


def test_what_the_log_says_by_hand():
    """Ten episodes: 6 untouched of which 3 succeed, 3 ended, one goes on, succeeds and counts 4."""
    found = measured([1] * 6 + [0] * 3 + [4], [True] * 3 + [False] * 6 + [True])
    assert found == pytest.approx(
        {
            "roulette/hopeless": 0.4,
            "roulette/ended": 0.3,
            "roulette/success": 0.7,
            "roulette/stopped_successes": 4 / 7,
        }
    )


class SlowReach(ReachPolicy):
    """It embeds the dot's distance from the square, and from afar it runs out of time."""

    def embed(self, obs: Observation) -> torch.Tensor:
        return torch.from_numpy(np.abs(ReachPolicy(speed=20).act(obs).actions[:, 0, :2]).max(-1, keepdims=True))


def source(policy: nn.Module, kind: type[LocalRolloutConfig] = RouletteConfig):
    env = DummyConfig(num_envs=4, tasks=("reach_red",)).build()
    made = kind().build(SimpleNamespace(temperature=1.0), env, ALONE)  # pyright: ignore[reportArgumentType]
    made.publish(policy, 0)  # pyright: ignore[reportArgumentType]
    return made


def order(iteration: int) -> GroupOrder:
    specs = [EpisodeSpec("reach_red", "train", 16 * iteration + i) for i in range(16)]
    return GroupOrder(specs, size=4, seed=iteration, first_group=0, num_groups=16)


def test_a_source_ends_hopeless_episodes_and_goes_on_from_its_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roulette, "MAX_STOPPED", 0.1)
    policy = SlowReach(speed=0.3, noise=0.1)
    ours, plain = source(policy), source(policy, LocalRolloutConfig)
    steps, hopeless = np.zeros((4, 2)), []
    for i in range(4):
        if i == 2:  # A checkpoint: another one goes on from it.
            state = json.loads(json.dumps(ours.state()))
            ours = source(policy)
            ours.load_state(state)
            assert json.loads(json.dumps(ours.state())) == state
        episodes = [s.collect(order(i), Stopwatch()) for s in (ours, plain)]
        assert [e.group for e in episodes[0]] == [e.group for e in episodes[1]]
        assert not any(name.startswith("roulette") for name in episodes[0][0].info)
        steps[i] = [sum(e.length for e in some) for some in episodes]
        hopeless.append(ours.metrics()["roulette/hopeless"])
    assert hopeless[0] == 0 and steps[0, 0] == steps[0, 1], "there is no probe yet"
    assert hopeless[-1] > 0.1 and steps[2:, 0].sum() < 0.95 * steps[2:, 1].sum()


def test_a_critic_is_refused():
    policy = SlowReach()
    policy.value_head = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"rollout\.kind: got 'roulette'.*value_head=false"):
        source(policy)
