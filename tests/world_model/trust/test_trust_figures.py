"""Trust figures against values worked out by hand: image likeness, outcomes, intervals, policies, the horizon."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from block_toy import episodes

from vla_rl.evaluation.signal import calibration, informedness_figure, outcome_figures
from vla_rl.evaluation.statistics import Figure, mean_bands, ratio_interval, wilson_interval
from world_model.trust.figures import FIGURES, GROUPS, as_text, bound_as_text, evidence, figure_info
from world_model.trust.measures.actions import other_actions, partners
from world_model.trust.measures.metrics import drift_curve, psnr, ssim
from world_model.trust.measures.outcomes import mean_maximum_rank_violation, outcomes_hold, policy_figures
from world_model.trust.measures.perceptual import frechet_distance, read_state
from world_model.trust.types import PolicyOutcomes


def flat(value: int, side: int = 16) -> np.ndarray:
    return np.full((side, side, 3), value, np.uint8)


def test_psnr_of_a_constant_difference() -> None:
    assert psnr(flat(100), flat(110)) == pytest.approx(10 * math.log10(255**2 / 100))
    assert psnr(flat(7), flat(7)) == 50  # Cut off, not infinite.
    with pytest.raises(ValueError, match=r"uint8 of one shape.*\(16, 16, 3\) and uint8 \(8, 8, 3\)"):
        psnr(flat(1), flat(1, side=8))


def test_ssim_of_flat_images_is_that_of_their_means() -> None:
    c1 = (0.01 * 255) ** 2
    assert ssim(flat(100), flat(150)) == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1))
    with pytest.raises(ValueError, match="at least 11 x 11 pixels, got 8 x 8"):
        ssim(flat(1, side=8), flat(1, side=8))
    with pytest.raises(ValueError, match=r"uint8 of one shape"):
        ssim(flat(1), flat(1, side=12))


def test_ssim_of_one_window_is_the_papers_formula() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 11, 11, 3), dtype=np.uint8)
    line = np.exp(-np.square(np.arange(-5, 6)) / (2 * 1.5**2))
    weight = np.outer(line, line) / line.sum() ** 2
    expected = []
    for x, y in zip(a.astype(float).transpose(2, 0, 1), b.astype(float).transpose(2, 0, 1), strict=True):
        mean_x, mean_y = (weight * x).sum(), (weight * y).sum()
        var_x, var_y = (weight * (x - mean_x) ** 2).sum(), (weight * (y - mean_y) ** 2).sum()
        cov = (weight * (x - mean_x) * (y - mean_y)).sum()
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        expected.append(
            (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
        )
    assert ssim(a, b) == pytest.approx(np.mean(expected), abs=1e-9)
    assert ssim(a, a) == pytest.approx(1)


def test_a_curve_averages_the_episodes_that_last_so_long() -> None:
    curve = drift_curve(np.array([[1.0, 4.0], [3.0, np.nan]]), np.array(["a", "b"]), frame_steps=8)
    assert curve.steps == (8, 16)
    assert curve.mean == (2, 4)
    assert curve.n == (2, 1)
    assert math.isnan(curve.low[1]), "one initial state has no interval"


def test_outcomes_by_hand() -> None:
    real = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0], bool)
    imagined = np.array([1, 1, 0, 1, 0, 0, 0, 0, 0, 0], bool)
    figures = outcome_figures(real, imagined, np.arange(10))
    expected = {
        "agreement": 0.8,
        "majority": 0.7,
        "agreement_over_majority": 0.1,
        "informedness": 2 / 3 - 1 / 7,
        "false_success": 1 / 7,
        "missed_success": 1 / 3,
        "precision": 2 / 3,
        "recall": 2 / 3,
        "real_success": 0.3,
        "imagined_success": 0.3,
        "imagined_minus_real": 0.0,
    }
    assert {name: figure.value for name, figure in figures.items()} == pytest.approx(expected)
    assert (figures["false_success"].low, figures["false_success"].high) == wilson_interval(1, 7)
    assert figures["false_success"].n == 7


def test_the_difference_to_the_majority_guess_is_paired() -> None:
    real = np.arange(100) < 40
    wrong = np.zeros(100, bool)
    wrong[:10] = True  # 10 successes missed: agreement .9, guess .6; they differ on 30 episodes, all in our favor.
    over = outcome_figures(real, real ^ wrong, np.arange(100))["agreement_over_majority"]
    assert over.value == pytest.approx(0.3)
    assert (over.low, over.high) == pytest.approx((0.3 - 1.96 * 0.0458, 0.3 + 1.96 * 0.0458), abs=0.015)


def test_informedness_does_not_depend_on_how_often_the_policy_succeeds() -> None:
    def judged(successes: int, failures: int) -> Figure:
        real = np.arange(successes + failures) < successes
        imagined = np.arange(successes + failures) % 10 < np.where(real, 4, 1)  # Recall .4, false successes .1.
        return outcome_figures(real, imagined, np.arange(len(real)))["informedness"]

    few, many = judged(50, 450), judged(450, 50)
    assert few.value == many.value == pytest.approx(0.3)
    error = np.sqrt(0.24 / 50 + 0.09 / 450)
    assert (few.low, few.high) == pytest.approx((0.3 - 1.96 * error, 0.3 + 1.96 * error), abs=0.02)


def test_few_successes_say_little_about_informedness() -> None:
    real = np.arange(41) < 1
    alone = outcome_figures(real, real, np.arange(41))["informedness"]
    assert (alone.value, alone.high) == (1, pytest.approx(1))
    assert alone.low == pytest.approx(1 - math.hypot(1 - wilson_interval(1, 1).low, wilson_interval(0, 40).high))
    assert (alone.n, alone.of) == (1, "successful episodes, the rarer outcome")
    none = outcome_figures(np.ones(5, bool), np.ones(5, bool), np.arange(5))["informedness"]
    assert math.isnan(none.value)
    assert (none.low, none.high, none.n) == (-1, 1, 0)


@pytest.mark.parametrize("successes", [1, 2, 3, 10])
def test_a_coin_rarely_tells_successes_from_failures(successes: int) -> None:
    rng, real = np.random.default_rng(successes), np.arange(successes + 40) < successes
    coins = rng.random((100, len(real))) < 0.5
    lows = [informedness_figure(real, coin, np.arange(len(real))).low for coin in coins]
    assert np.mean(np.array(lows) > 0) <= 0.07  # 2.5 % by the interval's confidence.


def test_without_failures_false_successes_are_unknown() -> None:
    figure = outcome_figures(np.ones(5, bool), np.ones(5, bool), np.arange(5))["false_success"]
    assert math.isnan(figure.value)
    assert (figure.low, figure.high, figure.n) == (0, 1, 0)


def test_calibration_by_hand() -> None:
    found = calibration(np.array([0.95] * 4 + [0.05] * 4), np.array([1, 1, 1, 0, 0, 0, 0, 0], bool), num_bins=10)
    assert found.error == pytest.approx(0.5 * 0.2 + 0.5 * 0.05)
    assert [(b.n, b.success) for b in found.bins] == [(4, 0.0), (4, 0.75)]


def test_ratios_resample_initial_states_not_episodes() -> None:
    rng = np.random.default_rng(1)
    above, below = rng.random(30), 1 + rng.random(30)
    value, alone = ratio_interval(above, below, np.arange(30))
    assert value == pytest.approx(above.sum() / below.sum())
    assert alone.low < value < alone.high
    again = ratio_interval(np.tile(above, 4), np.tile(below, 4), np.tile(np.arange(30), 4))
    assert again == (pytest.approx(value), pytest.approx(alone)), "copies of an episode are no evidence"


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = np.random.default_rng(2).normal(size=(400, 1))
    mean, low, high = mean_bands(values, np.arange(400))
    reach = 1.96 * values.std() / 20
    assert (low[0], high[0]) == pytest.approx((mean[0] - reach, mean[0] + reach), abs=0.015)


def test_rank_violation_by_hand() -> None:
    real, imagined = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.9, 0.5])
    assert mean_maximum_rank_violation(real, imagined) == pytest.approx((0 + 0.4 + 0.4) / 3)
    assert mean_maximum_rank_violation(real, real**2) == 0
    assert mean_maximum_rank_violation(real, -real) == pytest.approx((0.8 + 0.4 + 0.8) / 3)


def test_policies_are_compared_on_the_same_initial_states() -> None:
    starts = [f"s{i}" for i in range(40)]
    better = np.arange(40) < 30
    worse = np.arange(40) < 10
    policies = [
        PolicyOutcomes("worse", starts, worse, worse),
        PolicyOutcomes("better", starts[::-1], better[::-1], (np.arange(40) < 34)[::-1]),
    ]
    figures = policy_figures(policies)
    assert figures["pearson"].value == pytest.approx(1)
    assert figures["mmrv"].value == 0
    assert figures["policy_agreement"].value == pytest.approx(1 - 4 / 80)
    assert figures["policy_gap"].value == pytest.approx(4 / 80)
    assert figures["policy_gap"].low < 4 / 80 < figures["policy_gap"].high
    other = PolicyOutcomes("other", [*starts[1:], "elsewhere"], worse, worse)
    with pytest.raises(ValueError, match=r"'other'.*not the 40 of 'worse'"):
        policy_figures([policies[0], other])


def test_policies_with_the_same_success_rate_have_no_correlation_and_no_interval_of_one() -> None:
    starts, half = [f"s{i}" for i in range(10)], np.arange(10) < 5
    figures = policy_figures([PolicyOutcomes("a", starts, half, half), PolicyOutcomes("b", starts, ~half, ~half)])
    assert all(math.isnan(x) for name in ("pearson", "spearman") for x in (figures[name].low, figures[name].high))
    assert figures["mmrv"].value == 0 and figures["policy_agreement"].value == 1


def test_the_outcome_horizon_wants_more_than_a_guess_once_it_can_tell() -> None:
    real, imagined = np.zeros((2, 100, 4), bool)
    real[:3, 1] = imagined[2:5, 1] = True  # Too few successes to tell; 4 wrong, the guess 3: that may be chance.
    imagined[:20, 2] = True  # No success yet, and 20 imagined.
    real[:80, 3] = imagined[:40, 3] = True  # Most succeeded; half of these are known.
    starts = np.arange(100)
    assert outcomes_hold(real, imagined, starts, 10, 0.1).tolist() == [True, True, False, True]
    assert not outcomes_hold(real, imagined, starts, 10, 0.5)[3]
    imagined[:, 3] = True  # As good as the guess is not enough.
    assert not outcomes_hold(real, imagined, starts, 10, 0.1)[3]


def test_a_later_frame_vouches_for_one_where_few_have_succeeded() -> None:
    real, imagined = np.zeros((2, 100, 3), bool)
    real[:12, 1] = imagined[11:17, 1] = True  # One right of 12, 5 wrong of 88: that may be chance.
    real[:50, 2] = imagined[:45, 2] = True
    starts = np.arange(100)
    assert outcomes_hold(real, imagined, starts, 10, 0.1).tolist() == [True, True, True]
    imagined[:, 2] = False  # Now nothing later vouches for it.
    assert outcomes_hold(real, imagined, starts, 10, 0.1).tolist() == [True, False, False]
    imagined[:45, 2] = imagined[20:60, 1] = True
    imagined[11, 1] = False  # What is shown to be worse ends it all the same.
    assert outcomes_hold(real, imagined, starts, 10, 0.1).tolist() == [True, False, True]


def test_frechet_distance_of_two_gaussians() -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=(20_000, 2))
    b = rng.normal(size=(20_000, 2)) * [2, 1] + [3, 0]
    assert frechet_distance(a, b) == pytest.approx(9 + 1, rel=0.03)  # |3|^2 + (2 - 1)^2.
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights not found at .*alex\.pth"):
        read_state(tmp_path / "alex.pth")


def test_swapped_actions_are_another_initial_states() -> None:
    held_out = episodes(6)
    for i, j in enumerate(partners(held_out, seed=0)):
        assert held_out[i].start != held_out[j].start
        np.testing.assert_array_equal(other_actions(held_out, "swapped", 0)[i], held_out[j].actions)
    assert not any(a.any() for a in other_actions(held_out, "zero", 0))
    drawn = other_actions(held_out, "random", 0)[0]
    assert not drawn[0].any(), "nothing led to the first frame"
    assert set(np.unique(drawn)) <= {-1, 0, 1}


def test_every_figure_is_explained() -> None:
    for name, info in FIGURES.items():
        assert info.group in GROUPS, name
        assert info.meaning.endswith("."), name


def test_figures_for_people() -> None:
    assert as_text(0.123, "rate") == "12.3 %"
    assert as_text(-0.04, "points") == "−4.0 points"
    assert as_text(5e6, "times") == "over 1000 ×"
    assert as_text(math.nan, "rate") == "–"
    assert bound_as_text(0.1, "rate") == "10 %"
    assert evidence(Figure(value=0.5, low=0.25, high=0.75, n=8), "rate") == "[25.0, 75.0], n = 8 episodes"
    assert evidence(Figure(value=0.5, n=8), "rate") == "n = 8 episodes"


def test_a_figure_that_is_none() -> None:
    assert figure_info("styles/dark/skill") is FIGURES["skill"]
    with pytest.raises(ValueError, match=r"no trust figure is called 'false_sucess'\. Did you mean 'false_success'"):
        figure_info("false_sucess")


def test_the_docs_explain_every_figure() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "trust.md").read_text()
    titles = {re.sub(r"\d frames?", "N frames", info.title) for info in FIGURES.values()}
    assert sorted(title for title in titles if title not in docs) == []
