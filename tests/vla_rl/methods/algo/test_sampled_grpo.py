"""GRPO on a sample of the decisions: probabilities by hand, the same expectation, fewer passes, and it learns."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from toy_problem import ToyPolicy, make_episode, roll_out, success_rate

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import ConfigError
from vla_rl.methods.algo import sampled_grpo
from vla_rl.methods.algo.sampled_grpo import SampledGRPOConfig, chances, drawn, gradient_size
from vla_rl.training.config import OptimConfig
from vla_rl.types import Episode


def test_probabilities_by_hand():
    # A quarter of the mean, 1, is added: 3.25, 1.25, 0.25, 0.25 of 5. Of two to draw the first is certain (1.3), and
    # the other is shared by 1.75.
    assert chances(np.array([3.0, 1.0, 0.0, 0.0]), 0.5) == pytest.approx([1, 1.25 / 1.75, 0.25 / 1.75, 0.25 / 1.75])
    assert chances(np.array([3.0, 1.0, 0.0]), 1.0) == pytest.approx([1, 1, 1])
    assert chances(np.zeros(4), 0.25) == pytest.approx([0.25] * 4)
    assert len(chances(np.zeros(0), 0.5)) == 0


def test_draws_are_as_likely_as_they_should_be():
    chance, rng = np.array([1.0, 0.7, 0.2, 0.1]), np.random.default_rng(0)
    draws = [drawn(chance, rng) for _ in range(4000)]
    assert {len(rows) for rows in draws} == {2}
    found = np.bincount(np.concatenate(draws), minlength=4) / len(draws)
    assert found == pytest.approx(chance, abs=0.03)


def episodes() -> list[Episode]:
    """Two groups of two: a success in one step and a failure in three chunks of two steps."""
    made = []
    for group in range(2):
        made.append(make_episode([[1, 0]], [1], group=group, seed=2 * group))
        made.append(make_episode([[0, 0]] * 3, [2, 2, 2], truncated=True, group=group, seed=2 * group + 1))
    return made


def test_sizes_by_hand():
    batch = GRPOConfig().build(ToyPolicy()).prepare(episodes())
    log_prob = batch.chunks.log_prob.copy()
    log_prob[0, :, 0] = np.log([0.4, 0.9])  # The second action was not executed.
    log_prob[1, :, 0] = np.log([0.7, 0.6])
    batch.chunks = replace(batch.chunks, log_prob=log_prob)
    batch.advantage[:2] = [[2.0, 0.0], [-2.0, -2.0]]
    assert gradient_size(batch)[:2] == pytest.approx([2 * 0.6, 2 * 0.5], rel=1e-5)  # 0.3, 0.4 and so 0.5


def test_advantages_keep_their_expectation(monkeypatch: pytest.MonkeyPatch):
    number = itertools.count()
    monkeypatch.setattr(sampled_grpo.zlib, "crc32", lambda _: next(number))
    policy = ToyPolicy()
    whole = GRPOConfig().build(policy).prepare(episodes())
    learner = SampledGRPOConfig(share=0.5).build(policy)
    batches = [learner.prepare(episodes()) for _ in range(1000)]
    assert {int(b.active.sum()) for b in batches} == {4}
    for batch in batches[:3]:
        np.testing.assert_allclose(batch.old_log_prob[batch.active], whole.old_log_prob[batch.active], rtol=1e-6)
    np.testing.assert_allclose(np.mean([b.advantage for b in batches], 0), whole.advantage, atol=0.1)


def test_only_what_is_drawn_needs_passes(monkeypatch: pytest.MonkeyPatch):
    policy, sizes = ToyPolicy(), list[int]()
    evaluate = ToyPolicy.evaluate
    monkeypatch.setattr(
        ToyPolicy, "evaluate", lambda self, obs, *rest: sizes.append(obs.batch_size) or evaluate(self, obs, *rest)
    )
    learner = SampledGRPOConfig(share=0.25).build(policy)
    metrics = learner.update(learner.prepare(episodes()))
    assert sizes == [2, 2], "one pass for old likelihoods, one for the gradient, of two decisions of eight each"
    assert metrics["advantage/largest_weight"] > 1


@pytest.mark.parametrize("by", ["gradient", "uniform"])
def test_it_learns(by: str):
    policy = ToyPolicy()
    before = success_rate(policy)
    config = SampledGRPOConfig.model_validate({"by": by, "optim": OptimConfig(lr=0.01), "minibatch_size": 128})
    learner = config.build(policy)
    for iteration in range(12):
        learner.update(learner.prepare(roll_out(policy, 16, 8, iteration)))
    assert success_rate(policy) > before + 0.3


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"algo\.kl_coef: got 0\.1, allowed"):
        SampledGRPOConfig(kl_coef=0.1)
    continuous = [replace(e, chunks=replace(e.chunks, tokens=None)) for e in episodes()]
    with pytest.raises(ConfigError, match=r"algo\.by.*uniform"):
        SampledGRPOConfig().build(ToyPolicy()).prepare(continuous)
