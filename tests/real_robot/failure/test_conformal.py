"""The band keeps its promise with few successes, where a plain quantile does not."""

from __future__ import annotations

import numpy as np
import pytest

from real_robot.failure.conformal import (
    ALL,
    MIN_SHAPE,
    Band,
    BandKind,
    CalibrationError,
    Shape,
    conformal_quantile,
    successes_needed,
)


def curves(rng: np.random.Generator, num: int, length: int = 6) -> list[np.ndarray]:
    """Exchangeable curves with a level of their own, so that chunks of one curve go together; of uneven length."""
    level = rng.standard_exponential((num, 1))
    values = level * (1 + np.arange(length)) + rng.standard_normal((num, length))
    return [row[: rng.integers(2, length + 1)] for row in values]


@pytest.mark.parametrize(("alpha", "needed"), [(0.05, 19), (0.1, 9), (0.2, 4), (0.5, 1), (0.01, 99)])
def test_successes_needed_is_the_least_with_a_finite_rank(alpha: float, needed: int) -> None:
    assert successes_needed(alpha) == needed
    assert conformal_quantile(np.arange(needed, dtype=float), alpha) == needed - 1  # The largest one.
    with pytest.raises(CalibrationError, match=f"at least {needed} initial states.*got {needed - 1}"):
        conformal_quantile(np.arange(needed - 1, dtype=float), alpha)


def test_the_rank_by_hand() -> None:
    values = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 7.0, 8.0, 6.0])  # n = 9
    assert conformal_quantile(values, 0.2) == 8.0  # ceil(10 * 0.8) = 8th smallest
    assert np.quantile(values, 0.8) < 8.0


def test_false_alarms_of_fresh_successes_stay_at_alpha_and_the_plain_quantile_would_not() -> None:
    rng = np.random.default_rng(0)
    alpha, num_calibration, fresh = 0.1, 19, 40
    alarms, plain = [], []
    for trial in range(400):
        own = curves(rng, num_calibration + 8)
        band = Band.fit(own, [""] * len(own), alpha, seed=trial, shape_share=8 / 27)
        order = np.random.default_rng(trial).permutation(len(own))
        largest = [band.standing(own[i], "").max() for i in order[8:]]
        assert band.num_successes == len(largest) == num_calibration
        new = [band.standing(curve, "").max() for curve in curves(rng, fresh)]
        alarms.append(np.mean(np.asarray(new) > band.q))
        plain.append(np.mean(np.asarray(new) > np.quantile(largest, 1 - alpha)))
    error = np.std(alarms) / np.sqrt(len(alarms))
    assert np.mean(alarms) <= alpha + 3 * error
    assert np.mean(alarms) > 0.05, "a band that never alarms proves nothing"
    assert np.mean(plain) > alpha + 3 * error, "the interpolated quantile is exceeded too often"


@pytest.mark.parametrize("kind", ["centered", "constant"])
def test_the_other_bands_keep_the_promise_too(kind: BandKind) -> None:
    rng = np.random.default_rng(1)
    alarms = []
    for trial in range(300):
        band = Band.fit(curves(rng, 27), [""] * 27, 0.1, seed=trial, kind=kind)
        alarms.append(np.mean([band.standing(curve, "").max() > band.q for curve in curves(rng, 40)]))
    assert 0.03 < np.mean(alarms) <= 0.1 + 3 * np.std(alarms) / np.sqrt(len(alarms))


def test_a_constant_band_is_one_threshold_from_all_successes() -> None:
    rng = np.random.default_rng(2)
    own = curves(rng, 19)  # As few as alpha = 0.05 allows: none is spent on a shape.
    band = Band.fit(own, ["a", "b"] * 9 + ["a"], 0.05, kind="constant")
    assert band.num_successes == 19
    assert band.threshold(0, "a") == band.threshold(7, "b") == max(curve.max() for curve in own)


def test_shape_by_hand() -> None:
    own = [np.array([0.0, 1.0]), np.array([2.0, 3.0]), np.array([1.0, 2.0]), np.array([1.0, 10.0])]
    shape = Shape.of(own, alpha=0.5)  # Of 4 largest deviations 1, 3, 2, 6: rank ceil(5 * 0.5) = 3, up to 3.
    np.testing.assert_allclose(shape.center, [1.0, 4.0])
    np.testing.assert_allclose(shape.modulation, [1.0, 3.0])
    np.testing.assert_allclose(shape.standing(np.array([3.0, 7.0, 10.0])), [2.0, 1.0, 2.0])  # Last one holds.


def test_the_threshold_by_hand() -> None:
    band = Band({ALL: Shape(np.array([1.0, 2.0]), np.array([2.0, 4.0]))}, q=3.0, alpha=0.1, num_successes=20)
    assert [band.threshold(number, "any") for number in (0, 1, 9)] == [7.0, 14.0, 14.0]  # mu + q S; the last holds.


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_share_of_false_alarms_lies_between_none_and_all(alpha: float) -> None:
    with pytest.raises(ValueError, match=rf"failure\.alpha: got {alpha}, must lie between 0 and 1"):
        Band.fit([np.zeros(3)] * 40, [""] * 40, alpha)


def test_a_constant_score_has_a_finite_band() -> None:
    band = Band.fit([np.zeros(4)] * 40, ["a"] * 40, 0.1)
    assert np.isfinite(band.threshold(0, "a"))
    assert band.standing(np.full(4, 1e-3), "a").max() > band.q


def test_each_instruction_has_its_own_shape_and_unknown_ones_the_common() -> None:
    rng = np.random.default_rng(1)
    low, high = (list(rng.normal(mean, 1, (80, 5))) for mean in (0, 50))
    band = Band.fit(low + high, ["low"] * 80 + ["high"] * 80, 0.1)
    assert band.threshold(2, "low") < 10
    assert band.threshold(2, "high") > 40
    assert band.shape("never heard") is band.shapes[ALL]
    assert band.threshold(99, "low") == band.threshold(4, "low")


@pytest.mark.parametrize("num", [0, 1, 19 + MIN_SHAPE - 1])
def test_too_few_successes_refuse_and_say_how_many(num: int) -> None:
    with pytest.raises(CalibrationError, match=rf"has {num} successful episodes.*at least {19 + MIN_SHAPE} "):
        Band.fit([np.zeros(3)] * num, [""] * num, 0.05)
    Band.fit([np.zeros(3)] * (19 + MIN_SHAPE), [""] * (19 + MIN_SHAPE), 0.05)
