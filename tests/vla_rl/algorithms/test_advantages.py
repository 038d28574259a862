"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.algorithms.batch import shuffle_advantages
from vla_rl.algorithms.grpo import group_relative, leave_one_out
from vla_rl.algorithms.ppo import action_gae, chunk_gae, gae, whiten
from vla_rl.algorithms.reinforce_pp import batch_normalized
from vla_rl.methods.algo.mc_grpo import median_baseline


def test_grpo_by_hand():
    # Group 7: mean 1/4, sample variance ((3/4)^2 + 3 (1/4)^2) / 3 = 1/4, deviation 1/2: 3/2, -1/2, -1/2, -1/2.
    # Group 2: all the same. Group 5: mean 2, deviation sqrt(2): +-1/sqrt(2). The groups are interleaved.
    rewards = np.array([1, 5, 0, 1, 0, 3, 5, 0])
    groups = np.array([7, 2, 7, 5, 7, 5, 2, 7])
    advantage = group_relative(rewards, groups, eps=1e-12)
    root = 1 / np.sqrt(2)
    np.testing.assert_allclose(advantage, [1.5, 0, -0.5, -root, -0.5, root, 0, -0.5], rtol=1e-9)


def test_grpo_without_normalization_and_with_eps():
    rewards, groups = np.array([1.0, 0, 0, 0]), np.zeros(4, int)
    np.testing.assert_allclose(
        group_relative(rewards, groups, normalize_std=False), [0.75, -0.25, -0.25, -0.25], rtol=1e-12
    )
    # Deviation 1/2 plus eps 1/2 divides by 1.
    np.testing.assert_allclose(group_relative(rewards, groups, eps=0.5), [0.75, -0.25, -0.25, -0.25], rtol=1e-12)


def test_grpo_group_of_one_has_no_advantage():
    np.testing.assert_array_equal(group_relative(np.array([1.0, 3.0]), np.array([0, 1])), [0, 0])


def test_identical_rewards_give_exactly_zero():
    # Rounding in the mean of 0.1 + 0.1 + 0.1 must not leave a trace that eps then blows up.
    rewards, groups = np.full(3, 0.1), np.zeros(3, int)
    assert (group_relative(rewards, groups) == 0).all()
    assert (leave_one_out(rewards, groups) == 0).all()
    assert (median_baseline(rewards, groups)[0] == 0).all()
    assert (batch_normalized(rewards, np.array([1, 2, 3])) == 0).all()


def test_rloo_by_hand():
    # Group 0: 1 - 0, 0 - 1/2, 0 - 1/2. Group 1: 3 - 1 and 1 - 3. Group 2 has no other.
    rewards, groups = np.array([1.0, 0, 0, 3, 1, 9]), np.array([0, 0, 0, 1, 1, 2])
    np.testing.assert_allclose(leave_one_out(rewards, groups), [1, -0.5, -0.5, 2, -2, 0], rtol=1e-12)


def test_median_by_hand():
    # Median 2, deviations 2, 1, 0, 3, 4 (their median 2), so A = (R - 2) / 2; the episode at the median is left out.
    rewards = np.array([0.0, 1, 2, 5, 6])
    advantage, included = median_baseline(rewards, np.zeros(5, int), eps=1e-12)
    np.testing.assert_allclose(advantage, [-1, -0.5, 0, 1.5, 2], rtol=1e-9)
    np.testing.assert_array_equal(included, [True, True, False, True, True])


def test_median_of_success_rewards_uses_the_standard_deviation():
    # Two of five succeed: median 0, MAD 0, deviation sqrt((2 (3/5)^2 + 3 (2/5)^2) / 4) = sqrt(0.3).
    rewards = np.array([0.0, 1, 0, 1, 0])
    advantage, included = median_baseline(rewards, np.zeros(5, int), eps=1e-12)
    np.testing.assert_allclose(advantage, [0, 1 / np.sqrt(0.3), 0, 1 / np.sqrt(0.3), 0], rtol=1e-9)
    assert included.sum() == 4
    assert not included[[0, 2, 4]].all()
    # Three of five: median 1, the failures are below it.
    advantage, _ = median_baseline(1 - rewards, np.zeros(5, int), eps=1e-12)
    np.testing.assert_allclose(advantage, [0, -1 / np.sqrt(0.3), 0, -1 / np.sqrt(0.3), 0], rtol=1e-9)


def test_median_of_an_even_group_is_the_lower_one():
    advantage, included = median_baseline(np.array([4.0, 1, 2, 8]), np.zeros(4, int), eps=1e-12)
    np.testing.assert_allclose(advantage, np.array([2, -1, 0, 6]) / 1.5, rtol=1e-9)
    np.testing.assert_array_equal(included, [True, True, False, True])


def test_median_leaves_one_out_of_each_group():
    _, included = median_baseline(np.zeros(9), np.array([0, 1, 2] * 3))
    assert [included[np.arange(9) % 3 == g].sum() for g in range(3)] == [2, 2, 2]


def test_reinforce_pp_by_hand():
    # Over six actions: 1 1 1 0 0 0, mean 1/2, sample variance 6 (1/4) / 5 = 3/10.
    advantage = batch_normalized(np.array([1.0, 0.0]), np.array([3, 3]), eps=1e-12)
    np.testing.assert_allclose(advantage, [0.5 / np.sqrt(0.3), -0.5 / np.sqrt(0.3)], rtol=1e-9)
    # An episode counts once for each of its actions: 4 0 0 0, mean 1, variance (9 + 3) / 3 = 4.
    advantage = batch_normalized(np.array([4.0, 0.0]), np.array([1, 3]), eps=1e-12)
    np.testing.assert_allclose(advantage, [3 / 2, -1 / 2], rtol=1e-9)
    # The deviation 2 plus eps 2 divides by 4.
    np.testing.assert_allclose(batch_normalized(np.array([4.0, 0.0]), np.array([1, 3]), eps=2.0), [3 / 4, -1 / 4])


def test_gae_terminated_by_hand():
    # gamma 1/2, lambda 1/2. V = 2, 4; r = 0, 1; nothing after termination.
    # delta_1 = 1 + 0 - 4 = -3; delta_0 = 0 + 4/2 - 2 = 0; A_0 = 0 + (1/4)(-3) = -3/4.
    advantage, returns = gae(np.array([0, 1]), np.array([2, 4]), 0.0, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantage, [-0.75, -3])
    np.testing.assert_allclose(returns, [1.25, 1])


def test_gae_truncated_bootstraps_by_hand():
    # As above, but V(final observation) = 6: delta_1 = 1 + 3 - 4 = 0; A_0 = 0 + (1/4) 0 = 0.
    advantage, returns = gae(np.array([0, 1]), np.array([2, 4]), 6.0, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantage, [0, 0])
    np.testing.assert_allclose(returns, [2, 4])


def test_gae_lambda_one_is_the_discounted_return():
    reward, value = np.array([1.0, 2, 3]), np.array([0.3, -0.7, 5])
    _, returns = gae(reward, value, 4.0, gamma=0.9, gae_lambda=1.0)
    last = 3 + 0.9 * 4
    np.testing.assert_allclose(returns, [1 + 0.9 * (2 + 0.9 * last), 2 + 0.9 * last, last])


def test_chunk_gae_sums_the_rewards_of_a_chunk():
    # Chunk rewards 3 and 5, the same for every action of the chunk. delta_1 = 5 - 1 = 4, A_0 = 3 + 1/2 - 2 + 4/4.
    reward = np.array([[1.0, 2], [5, 0]])
    advantage, returns = chunk_gae(reward, np.array([2.0, 1]), 0.0, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantage, [[2.5, 2.5], [4, 4]])
    np.testing.assert_allclose(returns, [4.5, 5])


def test_action_gae_by_hand():
    # Steps: both actions of chunk 0, the first of chunk 1. V = 2, 2, 1 (held). r = 0, 0, 1. gamma = lambda = 1/2.
    # delta_2 = 1 - 1 = 0; delta_1 = 1/2 - 2 = -3/2; delta_0 = 2/2 - 2 = -1; A_1 = -3/2; A_0 = -1 + (1/4)(-3/2) = -11/8.
    reward = np.array([[0.0, 0], [1, 0]])
    advantage, returns = action_gae(reward, np.array([2, 1]), np.array([2.0, 1]), 0.0, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantage, [[-11 / 8, -3 / 2], [0, 0]])
    np.testing.assert_allclose(returns, [5 / 8, 1])
    # Truncated with V(final) = 2: delta_2 = 1 + 1 - 1 = 1, A_1 = -3/2 + 1/4 = -5/4, A_0 = -1 - 5/16 = -21/16.
    advantage, _ = action_gae(reward, np.array([2, 1]), np.array([2.0, 1]), 2.0, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_allclose(advantage, [[-21 / 16, -5 / 4], [1, 0]])


def test_whiten():
    np.testing.assert_allclose(whiten(np.array([1.0, 3.0]), eps=0.0), [-1 / np.sqrt(2), 1 / np.sqrt(2)])
    np.testing.assert_allclose(whiten(np.array([4.0])), [0.0])


@pytest.mark.parametrize("shape", [(50,), (50, 2)])
def test_shuffled_control_keeps_the_multiset_and_rows(shape):
    advantages = np.random.default_rng(0).normal(size=shape)
    shuffled = shuffle_advantages(advantages, np.random.default_rng(1))
    assert not np.array_equal(shuffled, advantages)
    as_rows = [tuple(np.atleast_1d(row)) for row in advantages]
    assert sorted(as_rows) == sorted(tuple(np.atleast_1d(row)) for row in shuffled)
    assert (shuffled == shuffle_advantages(advantages, np.random.default_rng(1))).all()
