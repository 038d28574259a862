"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.algorithms import losses
from vla_rl.algorithms.grpo import GRPOConfig

LOG = math.log


def weights_of(valid: np.ndarray, trajectory: np.ndarray, level: Any, reduction: Any) -> np.ndarray:
    """The weights of a batch that is one minibatch."""
    config = GRPOConfig(ratio_level=level, loss_reduction=reduction)
    (weight,) = losses.minibatch_weights(valid, trajectory, [np.arange(len(valid))], config)
    return weight


def surrogate(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, bool, float]:
    """Loss, clipped?, and d loss / d log ratio at low 0.2, high 0.28."""
    log_ratio = torch.tensor([LOG(ratio)], dtype=torch.float64, requires_grad=True)
    loss, clipped = losses.clipped_surrogate(
        log_ratio, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.28, dual_clip
    )
    loss.sum().backward()
    assert log_ratio.grad is not None
    return loss.item(), bool(clipped), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped"),
    [
        (1.0, 2.0, None, -2.0, False),
        (1.25, 2.0, None, -2.5, False),  # Above 1.2: the upper bound is 1.28, not 1 + clip_low.
        (1.5, 2.0, None, -2.56, True),
        (0.5, 2.0, None, -1.0, False),  # A good action that became rarer is not clipped.
        (0.75, -2.0, None, 1.6, True),
        (0.9, -2.0, None, 1.8, False),
        (5.0, -2.0, None, 10.0, False),  # A bad action that became likelier is not clipped ...
        (5.0, -2.0, 3.0, 6.0, True),  # ... but for dual clip.
        (2.0, -2.0, 3.0, 4.0, False),
        (5.0, 2.0, 3.0, -2.56, True),  # Dual clip leaves positive advantages alone.
        (0.75, -2.0, 3.0, 1.6, True),
    ],
)
def test_clipping_by_hand(ratio, advantage, dual_clip, loss, clipped):
    found, is_clipped, gradient = surrogate(ratio, advantage, dual_clip)
    assert found == pytest.approx(loss)
    assert is_clipped == clipped
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual_clip", "loss", "sign"),
    [
        (100.0, -2.0, 3.0, 6.0, 0),  # Dual clip has the last word.
        (100.0, -2.0, None, 2 * math.exp(20), 1),  # Pulled back: descending makes the action rarer.
        (100.0, 2.0, None, -2.56, 0),  # A good action is likely enough.
        (-100.0, 2.0, None, 0.0, 0),
        (-100.0, -2.0, 3.0, 1.6, 0),
    ],
)
def test_a_ratio_that_ran_away_keeps_loss_and_gradient_finite(log_ratio, advantage, dual_clip, loss, sign):
    x = torch.tensor([log_ratio], requires_grad=True)
    found, _ = losses.clipped_surrogate(x, torch.tensor([advantage]), 0.2, 0.28, dual_clip)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert found.item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert torch.isfinite(gradient).all()
    assert np.sign(gradient.round(decimals=6).item()) == sign


def test_a_reference_that_ran_away_pulls_with_a_finite_gradient():
    log_prob = torch.full((1, 1, 1), -100.0, requires_grad=True)
    loss = losses.kl_loss(log_prob, torch.zeros(1, 1, 1), torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and gradient.item() < 0


def test_the_bound_leaves_ordinary_ratios_alone_to_the_bit():
    x = torch.linspace(-30, 19.9, 1001)
    assert torch.equal(losses.bounded(x), x)


# One decision of H = 2 actions, A = 2 dimensions, ratios 1.1 1.2 / 1.0 2.0; a second, not valid.
RATIOS = torch.tensor([[[1.1, 1.2], [1.0, 2.0]], [[9.0, 9.0], [9.0, 9.0]]], dtype=torch.float64)
ADVANTAGE = torch.tensor([[1.0, 2.0], [7.0, 7.0]], dtype=torch.float64)


def loss_of(level: str, valid: list[list[bool]], advantage: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    weight = weights_of(np.array(valid), np.array([0, 1]), level, "token_mean")
    config = GRPOConfig.model_validate({"ratio_level": level, "clip": {"low": 0.2, "high": 0.28}})
    loss, metrics = losses.policy_loss(
        config, RATIOS.log(), torch.zeros_like(RATIOS), advantage, torch.from_numpy(weight)
    )
    return loss.item(), metrics


def test_token_ratio_by_hand():
    # -(1.1 + 1.2 + 2 (1.0 + 1.28)) / 4, of which one of four is clipped.
    loss, metrics = loss_of("token", [[True, True], [False, False]], ADVANTAGE)
    assert loss == pytest.approx(-(1.1 + 1.2 + 2 * (1.0 + 1.28)) / 4)
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 4)
    assert metrics["ratio"].item() == pytest.approx((1.1 + 1.2 + 1.0 + 2.0) / 4)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)


def test_action_ratio_by_hand():
    # Products 1.32 (clipped to 1.28) and 2.0 (to 1.28): -(1.28 + 2 * 1.28) / 2.
    loss, metrics = loss_of("action", [[True, True], [False, False]], ADVANTAGE)
    assert loss == pytest.approx(-(1.28 + 2 * 1.28) / 2)
    assert metrics["clip_fraction"].item() == pytest.approx(1.0)
    assert metrics["ratio"].item() == pytest.approx((1.32 + 2.0) / 2)


def test_chunk_ratio_by_hand():
    # One ratio 1.1 * 1.2 * 1 * 2 = 2.64 with a negative advantage, which is not clipped.
    loss, metrics = loss_of("chunk", [[True, True], [False, False]], torch.full((2, 2), -3.0, dtype=torch.float64))
    assert loss == pytest.approx(3 * 2.64)
    assert metrics["ratio"].item() == pytest.approx(2.64)
    # With the second action masked the ratio is 1.32.
    loss, _ = loss_of("chunk", [[True, False], [False, False]], torch.full((2, 2), -3.0, dtype=torch.float64))
    assert loss == pytest.approx(3 * 1.32)


def test_masked_actions_have_no_gradient():
    log_prob = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    valid = np.array([[True, False], [False, False]])
    for level in ("token", "action", "chunk"):
        weight = torch.from_numpy(weights_of(valid, np.array([0, 1]), level, "token_mean"))
        config = GRPOConfig.model_validate({"ratio_level": level})
        ones = torch.ones(2, 2, dtype=torch.float64)
        loss, _ = losses.policy_loss(config, log_prob, log_prob.detach(), ones, weight)
        (gradient,) = torch.autograd.grad(loss, log_prob)
        assert (gradient[0, 0] != 0).all()
        assert (gradient[0, 1] == 0).all()
        assert (gradient[1] == 0).all()


VALID = np.array([[True, True], [True, False], [True, True]])
TRAJECTORY = np.array([4, 4, 9])


@pytest.mark.parametrize(
    ("level", "reduction", "weight"),
    [
        ("token", "token_mean", [[1 / 5, 1 / 5], [1 / 5, 0], [1 / 5, 1 / 5]]),
        ("action", "trajectory_mean", [[1 / 6, 1 / 6], [1 / 6, 0], [1 / 4, 1 / 4]]),
        ("chunk", "token_mean", [[1 / 6, 1 / 6], [1 / 3, 0], [1 / 6, 1 / 6]]),
        ("chunk", "trajectory_mean", [[1 / 8, 1 / 8], [1 / 4, 0], [1 / 4, 1 / 4]]),
    ],
)
def test_weights_by_hand(level, reduction, weight):
    np.testing.assert_allclose(weights_of(VALID, TRAJECTORY, level, reduction), weight)


def test_trajectories_weigh_the_same_over_an_epoch_of_minibatches():
    # Trajectory 4 has three valid actions in two decisions, 9 two in one: 1/2 each over the batch, twice that in all
    # over two minibatches. Within a trajectory every action has the same.
    parts = [np.array([2, 0]), np.array([1])]
    first, second = losses.minibatch_weights(VALID, TRAJECTORY, parts, GRPOConfig(loss_reduction="trajectory_mean"))
    np.testing.assert_allclose(first, [[1 / 2, 1 / 2], [1 / 3, 1 / 3]])
    np.testing.assert_allclose(second, [[1 / 3, 0]])
    first, second = losses.minibatch_weights(VALID, TRAJECTORY, parts, GRPOConfig(loss_reduction="token_mean"))
    np.testing.assert_allclose(first, np.full((2, 2), 1 / 4))
    np.testing.assert_allclose(second, [[1, 0]])


def test_weights_of_nothing_valid_are_zero():
    weight = weights_of(np.zeros((2, 3), bool), np.array([0, 1]), "token", "trajectory_mean")
    assert (weight == 0).all()


def test_kl_by_hand():
    # k3 with log_ratio = log 2: 2 - 1 - log 2; with log 1: 0. Mean over the two tokens.
    log_prob = torch.tensor([[[LOG(0.25), LOG(0.5)]]], dtype=torch.float64)
    reference = torch.tensor([[[LOG(0.5), LOG(0.5)]]], dtype=torch.float64)
    kl = losses.kl_loss(log_prob, reference, torch.ones(1, 1, dtype=torch.float64))
    assert kl.item() == pytest.approx((1 - LOG(2)) / 2)


def test_k3_is_unbiased():
    # Its mean under p is KL(p || q), here exactly, over the three outcomes.
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.4, 0.4, 0.2])
    expected = (p * (p / q).log()).sum()
    assert (p * losses.k3((q / p).log())).sum().item() == pytest.approx(expected.item(), rel=1e-5)
    assert (losses.k3(torch.linspace(-3, 3, 7)) >= 0).all()


def test_entropy_mean_by_hand():
    entropy = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])
    assert losses.entropy_mean(entropy, torch.tensor([[0.5, 0.5]])).item() == pytest.approx(4.0)
    assert losses.entropy_mean(entropy, torch.tensor([[1.0, 0.0]])).item() == pytest.approx(2.0)


def test_value_loss_by_hand():
    value, target, old = torch.tensor([2.0]), torch.tensor([5.0]), torch.tensor([1.5])
    assert losses.value_loss(value, target, old, clip=None).item() == pytest.approx(4.5)
    # Huber with delta 10, from an error of 20: 10 (20 - 10/2).
    assert losses.value_loss(value, target + 17, old, clip=None).item() == pytest.approx(150)
    # Clipped: the value may go from 1.5 to 1.7 only, and 0.5 * 3.3^2 is worse than 0.5 * 3^2.
    assert losses.value_loss(value, target, old, clip=0.2).item() == pytest.approx(0.5 * 3.3**2)


def test_value_loss_beyond_the_clip_has_no_gradient():
    value = torch.tensor([2.0], requires_grad=True)
    losses.value_loss(value, torch.tensor([5.0]), torch.tensor([1.5]), clip=0.2).backward()
    assert value.grad is not None
    assert value.grad.item() == 0.0
