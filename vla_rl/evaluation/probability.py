"""Calibrated probability of success: Platt's sigmoid of logits, fitted on the policy's held-out episodes.

A threshold asks for hundreds of failed episodes before it can be vouched for, and throws away how sure the networks
are. A sigmoid has two numbers, so some hundred episodes of any outcome fit it; what it is worth is measured on episodes
that the fold's own fit did not see.
"""

from __future__ import annotations

import math

import numpy as np
from pydantic import FiniteFloat, PositiveFloat
from scipy.optimize import minimize
from scipy.special import expit, logit

from vla_rl.config import Config
from vla_rl.evaluation.outcomes import calibration
from vla_rl.evaluation.signal import auc_figure

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
