"""The probability of success over a score: the sigmoid that made the outcomes is found, and measured on unseen ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from vla_rl.evaluation.probability import cross_fit, fit_probability, platt
from vla_rl.evaluation.signal import auc


def drawn(n: int, slope: float, intercept: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    score = rng.normal(-1, 3, n)
    return score, rng.random(n) < expit(slope * score + intercept)


def test_the_sigmoid_that_made_the_outcomes_is_found() -> None:
    slope, intercept = platt(*drawn(20_000, 0.8, -0.5)) or (0, 0)
    assert slope == pytest.approx(0.8, abs=0.05) and intercept == pytest.approx(-0.5, abs=0.06)


def test_it_is_the_maximum_of_the_likelihood_of_platts_targets() -> None:
    score, real = drawn(60, 1.0, 0.0)
    fitted = platt(score, real)
    assert fitted is not None
    target = np.where(real, (real.sum() + 1) / (real.sum() + 2), 1 / ((~real).sum() + 2))
    error = expit(fitted[0] * score + fitted[1]) - target
    assert abs(error.sum()) < 1e-3 and abs((error * score).sum()) < 1e-2  # The score equations.


def test_separated_outcomes_give_a_finite_slope_and_the_order_is_kept() -> None:
    fitted = platt(np.arange(20.0), np.arange(20) >= 10)
    assert fitted is not None and 0 < fitted[0] < 20
    low, high = expit(fitted[0] * 9 + fitted[1]), expit(fitted[0] * 10 + fitted[1])
    assert low < 0.5 < high


@pytest.mark.parametrize("real", [np.zeros(10, bool), np.ones(10, bool), np.arange(10) < 5])
def test_one_outcome_alone_or_a_score_that_falls_with_success_has_no_probability(real: np.ndarray) -> None:
    assert platt(np.arange(10.0), real) is None
    assert fit_probability(np.arange(10.0), real, np.arange(10)) is None


def test_an_episode_is_never_judged_by_a_fit_that_saw_its_initial_state() -> None:
    score, real = drawn(100, 1.0, 0.0)
    groups = np.repeat(np.arange(25), 4)
    before = cross_fit(score, real, groups)
    flipped = real.copy()
    flipped[:4] = ~flipped[:4]  # One state's outcomes.
    assert (cross_fit(score, flipped, groups)[:4] == before[:4]).all()
    assert not (cross_fit(score, flipped, groups)[4:8] == before[4:8]).any()


def test_what_it_is_worth_on_unseen_episodes() -> None:
    score, real = drawn(4000, 0.8, -0.5)
    found = fit_probability(score, real, np.arange(4000))
    assert found is not None
    worth = found.cross_fitted
    assert worth.auc is not None and worth.auc_low is not None and worth.auc_high is not None
    assert worth.auc_low < worth.auc < worth.auc_high and worth.auc_high - worth.auc_low < 0.05
    assert worth.auc == pytest.approx(auc(score, real), abs=0.01)
    assert worth.calibration_error is not None and worth.calibration_error < 0.05
    assert worth.brier is not None and worth.constant_brier is not None and worth.brier < 0.7 * worth.constant_brier


def test_a_score_of_noise_is_worth_nothing() -> None:
    rng = np.random.default_rng(3)
    score, real = rng.normal(size=400), rng.random(400) < 0.5
    found = fit_probability(score, real, np.arange(400))
    if found is not None:
        worth = found.cross_fitted
        assert worth.auc is not None and worth.auc < 0.56
        assert (
            worth.brier is not None and worth.constant_brier is not None and worth.brier > 0.97 * worth.constant_brier
        )


def test_area_under_the_curve_by_hand() -> None:
    assert auc(np.array([1.0, 2, 3, 4]), np.array([False, True, False, True])) == 0.75
    assert auc(np.array([1.0, 1.0]), np.array([False, True])) == 0.5
    assert np.isnan(auc(np.array([1.0]), np.array([True])))
