"""Chunks that earlier policies drew: the decoupled objective is right on average, and nothing where none lags."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tabular_problem as tree
import torch
import toy_problem as toy

from vla_rl.algorithms import losses
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.methods.algo.dr_grpo import DRGRPOConfig
from vla_rl.types import ActionChunk, Episode

OPTIONS: dict[str, Any] = {"optim": {"name": "adamw", "lr": 1e-2}, "minibatch_size": 16, "epochs": 2}


def stamped(episodes: list[Episode], version: int | None) -> list[Episode]:
    """The same episodes, of a policy that had seen `version` updates."""
    return [
        replace(e, chunks=replace(e.chunks, version=None if version is None else np.full(e.num_chunks, version)))
        for e in episodes
    ]


def learnt(config, episodes: list[Episode], iteration: int = 0, critic: bool = False):
    policy = toy.ToyPolicy(critic=critic)
    learner = config.build(policy, seed=1)
    learner.iteration = iteration
    return learner.update(learner.prepare(episodes)), policy


# --- versions travel ---------------------------------------------------------------------------


def test_a_version_goes_where_its_chunk_goes():
    first, second = (ActionChunk(np.zeros((2, 1, 1), np.float32), version=np.array([v, v + 1])) for v in (3, 7))
    joined = ActionChunk.concatenate([first, second])
    assert joined.version is not None and joined.version.tolist() == [3, 4, 7, 8]
    taken = joined.select([2, 0]).version
    assert taken is not None and taken.tolist() == [7, 3]
    assert ActionChunk.concatenate([ActionChunk(np.zeros((2, 1, 1), np.float32))] * 2).version is None


def test_a_version_of_the_future_is_refused():
    episodes = stamped(toy.roll_out(toy.ToyPolicy(), 4, 4, seed=0), 3)
    with pytest.raises(ValueError, match="version 3, but the learner has made 2 updates"):
        learnt(GRPOConfig(**OPTIONS), episodes, iteration=2)


def test_doubly_robust_grpo_refuses_stale_chunks():
    config = DRGRPOConfig.model_validate({"kind": "dr_grpo", "values": tree.PlantedConfig()})
    learner = config.build(tree.TablePolicy())
    learner.iteration = 1
    with pytest.raises(ValueError, match="learns only from chunks that the policy drew as it is now"):
        learner.prepare(stamped(tree.roll_out(tree.TablePolicy(), 2, 4, seed=0), 0))
    learner.prepare(stamped(tree.roll_out(tree.TablePolicy(), 2, 4, seed=0), 1))


# --- nothing lags ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, ReinforcePPConfig])
def test_where_nothing_lags_nothing_changes_to_the_bit(kind):
    critic = kind is PPOConfig
    episodes = toy.roll_out(toy.ToyPolicy(critic=critic), 6, 4, seed=0)
    expected, plain = learnt(kind(**OPTIONS), stamped(episodes, None), 5, critic)
    found, policy = learnt(kind(**OPTIONS), stamped(episodes, 5), 5, critic)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), policy.parameters(), strict=True))


def test_chunks_that_do_not_lag_keep_their_numbers_beside_some_that_do(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "skips_zero_advantage", False)
    episodes = toy.roll_out(toy.ToyPolicy(), 6, 4, seed=0)
    mixed = stamped(episodes[:12], 5) + stamped(episodes[12:], 3)
    learner = GRPOConfig(filter_groups=False).build(toy.ToyPolicy())
    learner.iteration = 5
    batch, plain = learner.prepare(mixed), learner.prepare(stamped(episodes, 5))
    assert batch.lag is not None and batch.behavior_log_prob is not None
    fresh = batch.lag == 0
    assert fresh.any() and not fresh.all()
    assert np.array_equal(batch.behavior_log_prob[fresh], plain.old_log_prob[fresh])
    assert np.array_equal(batch.old_log_prob, plain.old_log_prob)
    assert batch.metrics["stale/lag_max"] == 2
    assert batch.metrics["stale/lag_mean"] == pytest.approx(2 * (1 - fresh.mean()))


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_the_decoupled_loss_and_its_gradient_by_hand(level, monkeypatch):
    monkeypatch.setattr(losses, "BEHAVIOR_CAP", 1.2)
    rng = np.random.default_rng(0)
    behavior, old, now = (torch.from_numpy(rng.normal(-1.0, 0.3, (3, 2, 2))) for _ in range(3))
    now.requires_grad_()
    config = GRPOConfig(ratio_level=level, clip={"low": 0.2, "high": 0.28})
    advantage = torch.tensor([[1.0, 1.0], [-0.5, -0.5], [2.0, 2.0]], dtype=torch.float64)
    weight = torch.full((3, 2), 1 / 6, dtype=torch.float64)
    loss, metrics = losses.policy_loss(config, now, old, advantage, weight, behavior)
    loss.backward()
    assert now.grad is not None
    axes = {"token": (), "action": (2,), "chunk": (1, 2)}[level]
    u = np.exp((now.detach() - old).numpy().sum(axes, keepdims=True))
    w = np.exp((old - behavior).numpy().sum(axes, keepdims=True))
    a, share = advantage.numpy()[:, :1, None], {"token": 1 / 12, "action": 1 / 6, "chunk": 1 / 3}[level]
    objective = np.minimum(u * a, np.clip(u, 0.8, 1.28) * a)
    assert loss.item() == pytest.approx(-(share * np.minimum(w, 1.2) * objective).sum())
    passes = u * a <= np.clip(u, 0.8, 1.28) * a
    gradient = -share * np.minimum(w, 1.2) * passes * a * u
    assert np.allclose(now.grad.numpy(), np.broadcast_to(gradient, (3, 2, 2)))
    assert metrics["importance_truncated"].item() == pytest.approx(share * (w > 1.2).sum())
    assert metrics["importance_max"].item() == pytest.approx(w.max()) and (w > 1.2).any() and (w < 1.2).any()


def test_effective_sample_share_by_hand():
    """Weights 1, 1, 1, 3: (6)^2 / (4 * 12) = 3/4."""
    weight = torch.full((4, 1), 0.25, dtype=torch.float64)
    old = torch.log(torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64))[:, None, None]
    _, metrics = losses.policy_loss(GRPOConfig(), old, old, weight, weight, torch.zeros_like(old))
    share = metrics["importance"] ** 2 / metrics["importance_squared"]
    assert share.item() == pytest.approx(0.75)


# --- refused ------------------------------------------------------------------------------------


def test_stale_chunks_without_log_probabilities_are_refused():
    episodes = toy.roll_out(toy.ToyPolicy(), 4, 4, seed=0)
    bare = [replace(e, chunks=replace(e.chunks, log_prob=None)) for e in stamped(episodes, 0)]
    with pytest.raises(ValueError, match="no log-probabilities"):
        learnt(GRPOConfig(**OPTIONS), bare, iteration=1)


# --- right on average --------------------------------------------------------------------------

REWARD = np.array([0.1, 0.9, 0.4, 0.0])  # Of each of the four chunks that the tree's first state has.


def one_step(policy: tree.TablePolicy, number: int, recorded: np.ndarray) -> ActionChunk:
    moves = np.array(divmod(number, 2))[None, :, None]
    return ActionChunk(moves.astype(np.float32), moves, log_prob=recorded, version=np.zeros(1, np.int64))


def enumerated(plant: float = 1.0, level: str = "chunk") -> tuple[torch.Tensor, torch.Tensor]:
    """The exact expectation over chunks of an older policy, and the gradient of the newer one's expected reward.

    Args:
        plant: factor on the recorded log-probabilities, for weights that are wrong.
    """
    behind, now = tree.TablePolicy(), tree.TablePolicy()
    with torch.no_grad():
        now.logits.add_(torch.from_numpy(np.random.default_rng(1).normal(0, 0.7, (3, 2, 2)).astype(np.float32)))
    config = GRPOConfig(ratio_level=level)
    obs = toy.observation(np.zeros((1, 2)))
    expected = torch.zeros(())
    for number in range(4):
        drawn = behind.evaluate(obs, one_step(behind, number, np.zeros((1, 2, 1), np.float32))).log_prob.detach()
        out = now.evaluate(obs, one_step(now, number, plant * drawn.numpy())).log_prob
        advantage, weight = torch.full((1, 2), float(REWARD[number])), torch.full((1, 2), 0.5)
        loss, _ = losses.policy_loss(config, out, out.detach(), advantage, weight, plant * drawn)
        expected = expected + drawn.sum().exp() * loss
    expected.backward()
    right = tree.TablePolicy()
    with torch.no_grad():
        right.logits.copy_(now.logits)
    p = right.logits.softmax(-1)
    total = -sum(p[0, 0, a] * p[0, 1, b] * float(REWARD[2 * a + b]) for a, b in itertools.product((0, 1), repeat=2))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert now.logits.grad is not None and right.logits.grad is not None
    return now.logits.grad, right.logits.grad


def test_the_gradient_of_stale_chunks_is_that_of_the_policy_as_it_is_now(monkeypatch):
    monkeypatch.setattr(losses, "BEHAVIOR_CAP", 1e6)
    found, right = enumerated()
    assert torch.allclose(found, right, atol=1e-6) and right.abs().max() > 0.04


@pytest.mark.parametrize("fault", [{"plant": 0.5}, {"plant": 0.0}, {"cap": 1.0}, {"level": "token"}])
def test_wrong_weights_are_caught(fault, monkeypatch):
    """Also the bias that truncation and weights of single tokens are known to have."""
    monkeypatch.setattr(losses, "BEHAVIOR_CAP", fault.get("cap", 1e6))
    found, right = enumerated(**{k: v for k, v in fault.items() if k != "cap"})
    assert (found - right).abs().max() > 5e-3


def test_sampled_batches_of_an_older_policy_meet_the_exact_gradient(monkeypatch):
    """Through the whole learner: groups drawn by an older policy, RLOO's baseline left out by a batch-wide one."""
    monkeypatch.setattr(losses, "BEHAVIOR_CAP", 1e6)
    behind, now = tree.TablePolicy(), tree.TablePolicy()
    with torch.no_grad():
        now.logits.add_(torch.from_numpy(np.random.default_rng(1).normal(0, 0.4, (3, 2, 2)).astype(np.float32)))
    config = GRPOConfig(ratio_level="chunk", minibatch_size=10**6, normalize_std=False, optim={"grad_clip": None})
    learner = config.build(now)
    learner.iteration = 1
    first = [_first_chunk_alone(e) for e in tree.roll_out(behind, 1500, 8, seed=3)]
    batch = learner.prepare(stamped(first, 0))
    rows = np.arange(batch.size)
    (weight,) = losses.minibatch_weights(batch.valid, batch.episode, [rows], config)
    out = now.evaluate(batch.observations(rows), batch.chunks)
    loss, _ = config.loss(batch, rows, weight, out, num_rows=len(rows), only_critic=False)
    loss.backward()
    assert now.logits.grad is not None
    found, right = now.logits.grad[0].clone(), _reward_gradient(now)
    unweighted = replace(batch, behavior_log_prob=None, lag=None)
    now.logits.grad = None
    plain, _ = config.loss(
        unweighted, rows, weight, now.evaluate(batch.observations(rows), batch.chunks), num_rows=1, only_critic=False
    )
    plain.backward()
    assert now.logits.grad is not None
    scale = 8 / 7  # A group's own reward is part of its mean.
    used = batch.size / len(first)  # Groups whose rewards are all the same are left out.
    assert torch.allclose(found * scale * used, right, atol=0.012)
    assert (now.logits.grad[0] * scale * used - right).abs().max() > 0.02


def _first_chunk_alone(episode: Episode) -> Episode:
    """One decision, paid with the chance that the table gives its chunk."""
    chunks = episode.chunks.select([0])
    reward = np.zeros((1, tree.H), np.float32)
    reward[0, -1] = REWARD[tree.chunk_number(chunks.actions[0])]
    ended = np.array([[False, True]])
    return replace(
        episode, obs=episode.obs.select([0]), chunks=chunks, reward=reward, terminated=ended & False, truncated=ended,
        num_steps=np.array([tree.H]), success=False,
    )  # fmt: skip


def _reward_gradient(policy: tree.TablePolicy) -> torch.Tensor:
    logits = policy.logits.detach().clone().requires_grad_()
    p = logits.softmax(-1)
    total = -sum(p[0, 0, a] * p[0, 1, b] * float(REWARD[2 * a + b]) for a, b in itertools.product((0, 1), repeat=2))
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert logits.grad is not None
    return logits.grad[0]
