"""Thresholds of success: hand-computed choices, the bound on false successes, and what cannot be calibrated."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binom, norm

from vla_rl.evaluation.probability import CalibrationError, choose_threshold, failures_needed
from vla_rl.evaluation.statistics import wilson_interval
from world_model.fit.calibration import SuccessCalibration, calibrate


def episodes(scores: list[float]) -> list[np.ndarray]:
    """Three frames each, of which the second is the highest."""
    return [np.array([score - 2, score, score - 1]) for score in scores]


def of_scores(failed: list[float], succeeded: list[float], **options: float) -> SuccessCalibration:
    logits = episodes([*failed, *succeeded])
    return calibrate(logits, logits, [False] * len(failed) + [True] * len(succeeded), **options)  # type: ignore[arg-type]


def test_failures_needed_is_where_wilsons_limit_for_none_passes_the_bound() -> None:
    assert (failures_needed(0.8), failures_needed(0.5)) == (1, 4)  # 3.84 / 4.84 = 0.79; 3.84 / 7.84 = 0.49
    assert failures_needed(0.1) == 35  # 1.96^2 / (n + 1.96^2) <= 0.1
    assert wilson_interval(0, 35).high <= 0.1 < wilson_interval(0, 34).high


def test_separable_scores_get_the_middle_of_the_gap_and_no_false_success() -> None:
    # 100 failures would allow 4 false successes (Wilson's limit .098), but none is needed.
    found = of_scores(list(np.linspace(-9, -3, 100)), [1.0, 2.0, 5.0])
    assert found.success_threshold == found.clip_threshold == pytest.approx(-1.0)
    assert found.figures["false_success"].value == 0
    assert found.figures["recall"].value == found.figures["precision"].value == 1
    assert found.figures["agreement"].value == 1
    assert (found.num_episodes, found.num_failures) == (103, 100)


def test_overlap_is_cut_where_the_bound_allows() -> None:
    # 6 failures reach 3 .. 8; of 100 only 4 may count, so the threshold is above 4, and below the next score, 4.5.
    failed = [-5.0] * 94 + [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    found = of_scores(failed, [*np.linspace(2.0, 2.9, 60), *np.linspace(4.5, 9.5, 60)])
    assert found.success_threshold == pytest.approx(4.25)
    false_success = found.figures["false_success"]
    assert (false_success.value, false_success.n) == (pytest.approx(0.04), 100)
    assert false_success.high == pytest.approx(wilson_interval(4, 100).high) and false_success.high <= 0.1
    assert found.figures["recall"].value == pytest.approx(0.5)
    assert found.figures["precision"].value == pytest.approx(60 / 64)
    # A looser bound lets them all in: 126 + 94 - 6 agree at 2 or below.
    loose = of_scores(failed, [*np.linspace(2.0, 2.9, 60), *np.linspace(4.5, 9.5, 60)], max_false_success=0.2)
    assert loose.success_threshold == pytest.approx((-5 + 2) / 2)


def test_of_the_allowed_thresholds_the_one_that_agrees_most_is_taken() -> None:
    # Allowed from -3 up. Above 0.5: one success is missed, no failure counts; above -1: four failures count.
    failed = [-9.0] * 92 + [-3.0, -2.0, -1.9, -1.8, 0.0, 0.0, 0.0, 0.0]
    found = of_scores(failed, [-1.0, 1.0, 2.0])
    assert found.success_threshold == pytest.approx(0.5)
    assert found.figures["recall"].value == pytest.approx(2 / 3)


def test_a_success_needs_both_at_the_same_frame() -> None:
    success = [*episodes([5.0] * 40), *episodes([5.0] * 10)]
    clip = [*[np.array([9.0, -4.0, -4.0])] * 40, *episodes([5.0] * 10)]  # high where the success head is not
    found = calibrate(success, clip, [False] * 40 + [True] * 10)
    assert found.figures["false_success"].value == 0  # Their scores: min(3, 9), min(5, -4), min(4, -4): 3.
    assert found.success_threshold == pytest.approx(4.0)
    assert found.success_alone.value == found.clip_alone.value == 1


def test_the_true_rate_keeps_the_bound_although_the_threshold_is_chosen() -> None:
    """Scores of failures and successes from overlapping Gaussians; the true rate above the threshold is known."""
    rng = np.random.default_rng(0)
    real, above = np.arange(120) >= 60, 0
    for _ in range(100):
        threshold = choose_threshold(rng.normal(1.5 * real), real, np.arange(120), 0.15)
        above += threshold is not None and norm.sf(threshold) > 0.15
    # At 95 % coverage, more than 10 of 100 are above the bound with probability 1 %; by the rate alone, 36 are.
    assert binom.sf(10, 100, 0.05) < 0.02
    assert above <= 10


def test_it_can_be_written_as_json() -> None:
    found = of_scores([-3.0] * 40, [1.0])
    values = json.loads(json.dumps(found.model_dump(mode="json"), allow_nan=False))
    assert SuccessCalibration.model_validate(values) == found


def test_too_few_failures_say_how_many_and_how_to_get_them() -> None:
    with pytest.raises(
        CalibrationError, match=r"39 failed .* among 42 held-out episodes, 40 are needed .* 10%.*source=policy"
    ):
        of_scores([-3.0] * 39, [1.0] * 3)
    with pytest.raises(CalibrationError, match="35 are needed"):  # the bound itself needs as many
        of_scores([-3.0] * 34, [1.0], min_failures=5)


def test_episodes_from_one_initial_state_are_not_many_failures() -> None:
    logits = episodes([-3.0] * 80 + [1.0] * 10)
    real = [False] * 80 + [True] * 10
    calibrate(logits, logits, real, [f"pick/{i}" for i in range(90)])
    with pytest.raises(CalibrationError, match="20 failed episodes from different initial states"):
        calibrate(logits, logits, real, [f"pick/{i % 20}" for i in range(90)])


def test_no_success_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="none of the 50 held-out episodes succeeded"):
        of_scores([-3.0] * 50, [])


def test_a_head_that_cannot_tell_is_an_error_with_the_best_there_is() -> None:
    best = wilson_interval(10, 50).high
    with pytest.raises(CalibrationError, match=rf"10% .*any of the 5 successful.* reaches {best:.0%}"):
        of_scores([-3.0] * 40 + [4.0] * 10, [3.5] * 5)


def test_bad_logits_are_refused() -> None:
    good = episodes([-3.0] * 40 + [1.0])
    real = [False] * 40 + [True]
    with pytest.raises(ValueError, match="as many"):
        calibrate(good[:-1], good, real)
    with pytest.raises(ValueError, match="episode 40 needs one logit"):
        calibrate([*good[:-1], np.zeros(0)], good, real)
    with pytest.raises(ValueError, match="episode 40 are not finite"):
        calibrate([*good[:-1], np.array([0.0, np.nan, 1.0])], good, real)
