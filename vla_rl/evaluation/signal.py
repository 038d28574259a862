"""How good a judge of success is: agreement of outcomes and probabilities with the real ones, AUC, order in a group.

The judge: imagination, or a learned reward. An outcome is True for success. GRPO compares the episodes of one initial
state with each other; what it can learn from is how a reward orders these, not where it lies. Scores and rewards are
one number an episode: its highest over the frames. Intervals are bootstraps over initial states, whose episodes are
drawn together.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import rankdata

from vla_rl.config import Config, Number
from vla_rl.evaluation.statistics import (
    NO_INTERVAL,
    Figure,
    Interval,
    clustered_wilson_interval,
    figure,
    paired_bootstrap_interval,
    resampled_counts,
    unpaired_difference_interval,
    wilson_interval,
)

_BLOCK = 4_000_000  # Numbers at a time, some 30 MB, of resamples of many episodes or frames.


def auc(score: np.ndarray, real: np.ndarray) -> float:
    """Area under the ROC curve: P(a success scores above a failure), ties counting half; NaN without both."""
    successes, failures = int(real.sum()), int((~real).sum())
    if not successes or not failures:
        return math.nan
    ranks = rankdata(score)
    return float((ranks[real].sum() - successes * (successes + 1) / 2) / (successes * failures))


def auc_draws(score: np.ndarray, real: np.ndarray, groups: np.ndarray, seed: int = 0) -> np.ndarray:
    """AUC of resamples of the initial states, float64 (resamples,); NaN where one lacks successes, or failures.

    All are NaN where there is one initial state: what others would give is not known. The same groups and seed give the
    same resamples, so that two scores of the same episodes can be compared draw by draw.
    """
    place = np.unique(groups, return_inverse=True)[1]
    counts = resampled_counts(int(place.max()) + 1, seed)
    if counts.shape[1] < 2:
        return np.full(len(counts), np.nan)
    step = max(_BLOCK // len(score), 1)
    blocks = (counts[begin : begin + step, place] for begin in range(0, len(counts), step))
    return np.concatenate([weighted_auc(score, real, weights) for weights in blocks])


def weighted_auc(score: np.ndarray, real: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """AUC of episodes that count as often as float (R, E) says: float64 (R,); NaN without a success, or a failure.

    Args:
        score: float (E,). real: bool (E,).
    """
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.r_[True, score[order][1:] != score[order][:-1]])
    up, down = (np.add.reduceat(weights[:, order] * rows[order], starts, axis=1) for rows in (real, ~real))
    below = np.cumsum(down, axis=1) - down / 2
    total = up.sum(1) * down.sum(1)
    return np.where(total > 0, (up * below).sum(1) / np.maximum(total, 1), np.nan)


def auc_figure(
    score: np.ndarray,
    real: np.ndarray,
    groups: np.ndarray,
    kinds: tuple[str, str] = ("successful episodes", "failed episodes"),
) -> Figure:
    """AUC of float (E,) for outcomes bool (E,), with its interval; n is that of the rarer outcome.

    Args:
        kinds: what episodes with True and with False are called.
    """
    successes, failures = int(real.sum()), int((~real).sum())
    rarer = kinds[0] if successes < failures else kinds[1]
    return figure(
        auc(score, real),
        interval_of(auc_draws(score, real, groups)),
        min(successes, failures),
        f"{rarer}, the rarer outcome",
    )


def group_correlation(reward: np.ndarray, real: np.ndarray, groups: np.ndarray) -> Figure | None:
    """Correlation of reward and outcome within initial states; None where no state has several episodes.

    Both are taken less their mean over the state's episodes, and correlated over all of these: 1 where the reward is an
    advantage as good as the truth's. NaN where no state's episodes differ, in reward or in outcome.

    Args:
        reward: float (E,). real: bool (E,). groups: (E,), initial states.
    """
    place, counts = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    shared = counts > 1
    if not shared.any():
        return None
    r, y = (
        values - (np.bincount(place, values) / counts)[place]
        for values in (np.float64(reward), real.astype(np.float64))
    )
    sums = np.stack([np.bincount(place, product)[shared] for product in (r * y, r * r, y * y)], 1)

    def correlation(both: np.ndarray, rewards: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
        differ = (rewards > 1e-12) & (outcomes > 1e-12)
        return np.where(differ, both / np.sqrt(np.where(differ, rewards * outcomes, 1.0)), np.nan)

    drawn = correlation(*(resampled_counts(len(sums)) @ sums).T)
    value = float(correlation(*sums.sum(0)))
    interval = interval_of(drawn) if math.isfinite(value) and len(sums) > 1 else NO_INTERVAL
    return figure(value, interval, len(sums), "initial states with several episodes")


def calibration_interval(probability: np.ndarray, real: np.ndarray, groups: np.ndarray, num_bins: int) -> Interval:
    """95 % interval of `outcomes.calibration`'s error, in `num_bins` bins of equal width.

    The error is a sum of absolute values: with few episodes in a bin it lies above the truth, and that of a resample
    lies above it again. So resamples' quantiles are reflected at the error itself (the basic bootstrap; Davison &
    Hinkley 1997, section 5.2.1), and cut off at 0.
    """
    states = np.unique(groups, return_inverse=True)[1]
    place = np.minimum((probability * num_bins).astype(np.int64), num_bins - 1)
    sums = np.zeros((int(states.max()) + 1, num_bins + 1))
    np.add.at(sums, (states, place), probability - real)
    np.add.at(sums[:, -1], states, 1.0)
    if len(sums) < 2:
        return NO_INTERVAL

    def error(sums: np.ndarray) -> np.ndarray:
        return np.abs(sums[..., :-1]).sum(-1) / np.maximum(sums[..., -1], 1.0)

    value, drawn = float(error(sums.sum(0))), interval_of(error(resampled_counts(len(sums)) @ sums))
    return Interval(max(2 * value - drawn.high, 0.0), max(2 * value - drawn.low, 0.0))


def interval_of(draws: np.ndarray) -> Interval:
    """95 % percentile interval of a bootstrap's draws, NaN left out."""
    draws = draws[np.isfinite(draws)]
    return Interval(*map(float, np.quantile(draws, [0.025, 0.975]))) if len(draws) else NO_INTERVAL


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
