"""AUC, order within a group and the calibration error's interval, against numbers worked out by hand."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from vla_rl.evaluation import signal
from vla_rl.evaluation.signal import (
    auc,
    auc_draws,
    auc_figure,
    calibration,
    calibration_interval,
    difference_figure,
    group_correlation,
)


def test_auc_counts_pairs() -> None:
    score, real = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    assert auc(score, real) == (1 + 0.5 + 1 + 1) / 4
    assert math.isnan(auc(score, np.ones(4, bool)))


def test_a_resample_of_auc_is_the_auc_of_what_was_drawn() -> None:
    rng = np.random.default_rng(0)
    groups, real = np.repeat(np.arange(6), 3), rng.random(18) < 0.5
    score = np.round(rng.random(18) + real, 1)
    from vla_rl.evaluation.statistics import resampled_counts

    draws = auc_draws(score, real, groups)
    for row in (0, 7, 99):
        drawn = np.repeat(np.arange(18), resampled_counts(6)[row].astype(int)[groups])
        assert draws[row] == pytest.approx(auc(score[drawn], real[drawn]))


def test_aucs_interval_knows_that_episodes_share_states() -> None:
    rng = np.random.default_rng(1)
    real = rng.random(60) < 0.4
    score = rng.normal(size=60) + real
    alone, repeated = (auc_figure(np.tile(score, k), np.tile(real, k), np.tile(np.arange(60), k)) for k in (1, 4))
    assert (repeated.low, repeated.high) == (pytest.approx(alone.low), pytest.approx(alone.high))
    assert alone.n == real.sum() and alone.of == "successful episodes, the rarer outcome"


def test_one_initial_state_gives_no_interval() -> None:
    """Its resamples are all alike: an interval without width would vouch for states that nobody has seen."""
    real, one, two = np.array([True, True, False, False]), np.full(4, "a"), np.array(["a", "a", "b", "b"])
    score = np.array([0.9, 0.6, 0.7, 0.1])
    alone = auc_figure(score, real, one)
    assert alone.value == 0.75 and math.isnan(alone.low) and math.isnan(alone.high)
    order = group_correlation(score, np.array([True, False, True, False]), one)
    assert order is not None and order.value > 0 and math.isnan(order.low) and math.isnan(order.high)
    assert not math.isnan(auc_figure(score, real[[0, 2, 1, 3]], two).low)
    gap = difference_figure(real, ~real, one)
    assert gap.value == 0 and math.isnan(gap.low) and math.isnan(gap.high)


def test_aucs_memory_does_not_grow_with_the_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is measured on frames, tens of thousands of them."""
    rng, count = np.random.default_rng(3), 20_000
    real, groups = rng.random(count) < 0.4, rng.integers(50, size=count)
    score = rng.normal(size=count) + real
    tracemalloc.start()
    try:
        draws = auc_draws(score, real, groups)
        assert tracemalloc.get_traced_memory()[1] < 400e6
    finally:
        tracemalloc.stop()
    few = slice(0, 500)
    whole = auc_draws(score[few], real[few], groups[few])
    monkeypatch.setattr(signal, "_BLOCK", 3 * 500)
    assert np.array_equal(auc_draws(score[few], real[few], groups[few]), whole) and np.isfinite(draws).all()


def test_group_correlation_leaves_out_what_states_differ_in() -> None:
    groups = np.array(["a", "a", "b", "b", "c"])
    real = np.array([True, False, True, False, True])
    reward = np.array([0.9, 0.7, 0.3, 0.1, 0.0])  # In each state the success is worth more by .2, whatever the level.
    found = group_correlation(reward, real, groups)
    assert found is not None and found.value == pytest.approx(1) and found.n == 2
    # Deviations: rewards .1, -.1, -.1, .1 against .5, -.5, .5, -.5 cancel out.
    crossed = group_correlation(np.array([0.9, 0.7, 0.1, 0.3, 0.0]), real, groups)
    assert crossed is not None and crossed.value == pytest.approx(0)
    flat = group_correlation(np.zeros(5), real, groups)
    assert flat is not None and math.isnan(flat.value) and math.isnan(flat.low)
    assert group_correlation(reward[:2], real[:2], np.array(["a", "b"])) is None


@pytest.mark.parametrize("off", [0.0, 0.15])
def test_the_calibration_errors_interval(off: float) -> None:
    """It holds the truth most of the time; near 0 it errs to the high side, which is the safe one."""
    rng, held, high = np.random.default_rng(2), 0, []
    for _ in range(20):
        probability = rng.uniform(0, 0.8, 400)
        real = rng.random(400) < probability + off
        found = calibration_interval(probability, real, np.arange(400), 10)
        assert 0 <= found.low <= calibration(probability, real, 10).error
        held += found.high >= off and (off == 0 or found.low <= off)
        high.append(found.high)
    assert held >= 17
    assert off < np.mean(high) < off + 0.1
