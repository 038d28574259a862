"""Threshold and calibrated probability of success of a score, chosen on the policy's held-out episodes.

A threshold asks for hundreds of failed episodes before it can be vouched for, and throws away how sure the networks
are. A sigmoid has two numbers, so some hundred episodes of any outcome fit it; what it is worth is measured on episodes
that the fold's own fit did not see.

Success threshold of a score, chosen on held-out episodes so that false successes are bounded.

A false success is a failed episode that counts as a success. Its rate is over the failed episodes; what bounds it is
the upper end of its 95 % interval.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from pydantic import FiniteFloat, PositiveFloat
from scipy.optimize import minimize
from scipy.special import expit, logit

from vla_rl.config import Config
from vla_rl.evaluation.signal import auc_figure, calibration
from vla_rl.evaluation.statistics import clustered_wilson_interval, wilson_interval

NUM_FOLDS, NUM_BINS = 5, 10
STEEPEST = 20.0  # A slope above this is a step: the outcomes were separated, and nothing bounds it from above.


class CrossFitted(Config):
    """What probabilities are worth on episodes that their sigmoid was not fitted on; None where it cannot be known.

    Attributes:
        auc: share of pairs of a success and a failure in which the success has the higher probability.
        auc_low, auc_high: 95 % interval, by bootstrap over initial states.
        brier: mean squared difference of probability and outcome; `constant_brier`: that of always saying the mean.
        calibration_error: expected, over 10 bins (Guo et al. 2017, arXiv 1706.04599, eq. 3).
        num_episodes: E.
    """

    auc: float | None = None
    auc_low: float | None = None
    auc_high: float | None = None
    brier: float | None = None
    constant_brier: float | None = None
    calibration_error: float | None = None
    num_episodes: int


class SuccessProbability(Config):
    """P(success) = sigmoid(slope * score + intercept), where the score is an episode's highest logit.

    Attributes:
        slope: above 0; of the logit. intercept: at logit 0.
        cross_fitted: what such a fit is worth on episodes that it has not seen.
    """

    slope: PositiveFloat
    intercept: FiniteFloat
    cross_fitted: CrossFitted


def fit_probability(score: np.ndarray, real: np.ndarray, groups: np.ndarray) -> SuccessProbability | None:
    """Fit the sigmoid on all episodes, and measure it fold by fold; None where a higher score means no more success.

    Args:
        score: float (E,), the highest over an episode's frames of the lower of the two networks' logits.
        real: bool (E,), real outcomes. groups: (E,), initial states; a fold holds all episodes of a state.
    """
    fitted = platt(score, real)
    if fitted is None:
        return None
    probability = cross_fit(score, real, groups)
    return SuccessProbability(slope=fitted[0], intercept=fitted[1], cross_fitted=measure(probability, real, groups))


def platt(score: np.ndarray, real: np.ndarray) -> tuple[float, float] | None:
    """Fit slope and intercept by maximum likelihood; None where the slope would not be above 0.

    Targets are (N+ + 1) / (N+ + 2) and 1 / (N- + 2) in place of 1 and 0, so that outcomes that the score separates give
    a finite slope (Platt 1999, "Probabilistic outputs for support vector machines", section 2.2).

    Args:
        score: float (E,). real: bool (E,).
    """
    if not real.any() or real.all():
        return None
    successes, failures = int(real.sum()), int((~real).sum())
    return sigmoid_fit(score, np.where(real, (successes + 1) / (successes + 2), 1 / (failures + 2)))


def sigmoid_fit(score: np.ndarray, target: np.ndarray) -> tuple[float, float] | None:
    """Slope and intercept of the sigmoid of a score that is nearest to targets, by cross-entropy.

    Args:
        score: float (E,). target: float (E,), in 0 .. 1; not all 0, nor all 1.

    Returns:
        None where the slope would not be above 0.
    """
    center, spread = float(score.mean()), float(score.std()) or 1.0
    x = (score - center) / spread

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        z = weights[0] * x + weights[1]
        error = expit(z) - target
        return float((np.logaddexp(0.0, z) - target * z).sum()), np.array([(error * x).sum(), error.sum()])

    slope, at_center = minimize(loss, np.array([0.0, logit(target.mean())]), jac=True, method="L-BFGS-B").x
    slope = min(float(slope) / spread, STEEPEST)
    return (slope, float(at_center) - slope * center) if slope > 0 else None


def cross_fit(score: np.ndarray, real: np.ndarray, groups: np.ndarray, num_folds: int = NUM_FOLDS) -> np.ndarray:
    """Probabilities from sigmoids fitted without the episode's own fold: float64 (E,); NaN where no fit was possible.

    Folds are of whole initial states, assigned in turn by their order of appearance.
    """
    _, first, place = np.unique(groups, return_index=True, return_inverse=True)
    fold = np.argsort(np.argsort(first))[place] % num_folds
    probability = np.full(len(score), np.nan)
    for k in range(num_folds):
        inside = fold == k
        fitted = platt(score[~inside], real[~inside])
        if fitted is not None:
            probability[inside] = expit(fitted[0] * score[inside] + fitted[1])
    return probability


def measure(probability: np.ndarray, real: np.ndarray, groups: np.ndarray) -> CrossFitted:
    """What probabilities, float (E,) or NaN where unknown, are worth against outcomes, bool (E,), of initial states."""
    known = np.isfinite(probability)
    p, y, states = probability[known], real[known], groups[known]
    if y.all() or not y.any():
        return CrossFitted(num_episodes=len(p))
    area = auc_figure(p, y, states)
    return CrossFitted(
        auc=area.value,
        auc_low=None if math.isnan(area.low) else area.low,
        auc_high=None if math.isnan(area.high) else area.high,
        brier=float(((p - y) ** 2).mean()),
        constant_brier=float(((y.mean() - y) ** 2).mean()),
        calibration_error=calibration(p, y, NUM_BINS).error,
        num_episodes=len(p),
    )


class CalibrationError(ValueError):
    """No threshold can be vouched for."""


def failures_needed(max_false_success: float) -> int:
    """Failed episodes with which a rate of 0 has an upper 95 % limit (Wilson) of at most `max_false_success`."""
    enough = 1
    while wilson_interval(0, enough).high > max_false_success:
        enough += 1
    return enough


def choose_threshold(score: np.ndarray, real: np.ndarray, groups: np.ndarray, max_false_success: float) -> float | None:
    """The threshold that agrees with most real outcomes, of those that keep the bound on false successes.

    The lowest threshold allowed is the lowest score of a failed episode from which upwards the bound holds. From there
    up, outcomes change only at scores: the gap between two neighboring ones in which most agree is taken (the widest,
    of equals), and its middle.

    The bound is honest although the threshold is chosen on the same episodes: with n failures, the true rate above
    the (k + 1)-th highest failed score is Beta(k + 1, n - k) whatever the scores' distribution (Wilks 1941, Ann. Math.
    Stat. 12:91-96), and Wilson's limit for k of n lies above 95 % of that. Higher thresholds only lower the rate.

    Args:
        score: float64 (E,). real: bool (E,). groups: (E,), initial states.

    Returns:
        None where no allowed threshold lets a success count.
    """
    failed, lowest = score[~real], math.inf
    for level in np.unique(failed)[::-1]:
        if clustered_wilson_interval(failed > level, groups[~real]).high > max_false_success:
            break
        lowest = float(level)
    gaps = [
        (float((real == (score > low)).mean()), float(high - low), float(low + high) / 2)
        for low, high in pairwise(np.unique(score))
        if low >= lowest and high <= score[real].max()
    ]
    return max(gaps)[2] if gaps else None


def check_outcomes(
    real: np.ndarray, groups: np.ndarray, max_false_success: float, min_failures: int, get_more: str
) -> None:
    """Check that held-out episodes can bound the false-success rate, whatever the networks say of them.

    Args:
        real: bool (E,), outcomes. groups: (E,), initial states.
        get_more: what to do where they cannot, for the message.

    Raises:
        CalibrationError: too few failures, or no success.
    """
    found, needed = len(np.unique(groups[~real])), max(min_failures, failures_needed(max_false_success))
    if found < needed:
        raise CalibrationError(
            f"calibration: {found} failed episodes from different initial states among {len(real)} held-out episodes, "
            f"{needed} are needed to bound the false-success rate at {max_false_success:.0%}. {get_more}"
        )
    if not real.any():
        raise CalibrationError(
            f"calibration: none of the {len(real)} held-out episodes succeeded, so nothing tells what a success looks "
            f"like. {get_more}"
        )
