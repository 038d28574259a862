"""Agreement of predicted outcomes, and of probabilities of success, with the real ones.

The judge: imagination, or a learned reward. An outcome is True for success.
"""

from __future__ import annotations

import math

import numpy as np

from vla_rl.config import Config, Number
from vla_rl.evaluation.statistics import (
    NO_INTERVAL,
    Figure,
    clustered_wilson_interval,
    figure,
    paired_bootstrap_interval,
    unpaired_difference_interval,
    wilson_interval,
)


def rate_figure(outcomes: np.ndarray, groups: np.ndarray, of: str = "episodes") -> Figure:
    """A rate of bool (E,) with Wilson's interval, n reduced where episodes share an initial state; no episode: NaN."""
    if len(outcomes) == 0:
        return figure(math.nan, wilson_interval(0, 0), 0, of)
    return figure(float(outcomes.mean()), clustered_wilson_interval(outcomes, groups), len(outcomes), of)


def majority_guess(real: np.ndarray) -> np.ndarray:
    """bool (E,): where always answering with the commoner of the real outcomes is right."""
    return real == (real.mean() > 0.5)


def difference_figure(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> Figure:
    """Mean of after minus before, bool (E,), with a paired bootstrap interval over initial states, if several."""
    several = len(np.unique(groups)) > 1
    interval = paired_bootstrap_interval(before, after, clusters=groups) if several else NO_INTERVAL
    return figure(float(after.mean() - before.mean()), interval, len(before))


def informedness_figure(real: np.ndarray, imagined: np.ndarray, groups: np.ndarray) -> Figure:
    """Youden's J (Youden 1950, Cancer 3:32-35): recall minus the false-success rate, of bool (E,).

    n is that of the rarer outcome, on which the interval mostly depends. Without successes, or failures, J is NaN and
    its interval [-1, 1].
    """
    interval = unpaired_difference_interval(imagined[~real], imagined[real], groups[~real], groups[real])
    successes, failures = int(real.sum()), int((~real).sum())
    value = float(imagined[real].mean() - imagined[~real].mean()) if successes and failures else math.nan
    rarer = "successful" if successes < failures else "failed"
    return figure(value, interval, min(successes, failures), f"{rarer} episodes, the rarer outcome")


def outcome_figures(real: np.ndarray, imagined: np.ndarray, groups: np.ndarray) -> dict[str, Figure]:
    """Agreement and errors of imagined outcomes; the names are explained in `figures.FIGURES`.

    The majority guess knows the commoner outcome of the very episodes it is judged on, which favors it. A false
    success is a failed episode imagined as a success; its rate is over the failed episodes, so that it does not
    depend on how good the policy is. With no failed episode its interval is [0, 1].

    Args:
        real, imagined: bool (E,). groups: (E,), initial states.
    """
    agree, guess = real == imagined, majority_guess(real)
    return {
        "agreement": rate_figure(agree, groups),
        "majority": rate_figure(guess, groups),
        "agreement_over_majority": difference_figure(guess, agree, groups),
        "informedness": informedness_figure(real, imagined, groups),
        "false_success": rate_figure(imagined[~real], groups[~real], "failed episodes"),
        "missed_success": rate_figure(~imagined[real], groups[real], "successful episodes"),
        "precision": rate_figure(real[imagined], groups[imagined], "imagined successes"),
        "recall": rate_figure(imagined[real], groups[real], "successful episodes"),
        "real_success": rate_figure(real, groups),
        "imagined_success": rate_figure(imagined, groups),
        "imagined_minus_real": difference_figure(real, imagined, groups),
    }


class CalibrationBin(Config):
    """Episodes whose probability lies in one part of 0 .. 1: its mean, and the share that really succeeded."""

    probability: Number
    success: Number
    low: Number
    high: Number
    n: int


class Calibration(Config):
    """Does "70 %" happen seven times in ten? Bins with episodes in them, and the expected calibration error."""

    bins: tuple[CalibrationBin, ...]
    error: Number


def calibration(probability: np.ndarray, real: np.ndarray, num_bins: int) -> Calibration:
    """Calibration curve in `num_bins` bins of equal width, and expected calibration error.

    The error is the mean over episodes of |mean probability - success rate| of the episode's bin (Naeini et al. 2015,
    AAAI; Guo et al. 2017, arXiv 1706.04599, eq. 3).

    Args:
        probability: float (E,), in 0 .. 1: the highest that an episode reached. real: bool (E,).
    """
    place = np.minimum((probability * num_bins).astype(np.int64), num_bins - 1)
    bins, error = [], 0.0
    for b in np.unique(place):
        inside = place == b
        n, successes = int(inside.sum()), int(real[inside].sum())
        mean = float(probability[inside].mean())
        low, high = wilson_interval(successes, n)
        bins.append(CalibrationBin(probability=mean, success=successes / n, low=low, high=high, n=n))
        error += n / len(real) * abs(mean - successes / n)
    return Calibration(bins=tuple(bins), error=error)
