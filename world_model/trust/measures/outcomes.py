"""Do imagined episodes end as the real ones did? Agreement, false successes, calibration, and several policies.

An outcome is True for success. "Imagined" outcomes come from replaying logged actions, or from a policy that acts in
the world model; both are compared with the real outcome from the same initial state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vla_rl.common.numbers import Number
from vla_rl.config import Config
from vla_rl.evaluation.statistics import (
    Interval,
    clustered_wilson_interval,
    paired_bootstrap_interval,
    pearson,
    spearman,
    unpaired_difference_interval,
    wilson_interval,
)
from world_model.trust.figures import Figure, figure
from world_model.trust.intervals import mean_bands, resampled_counts
from world_model.trust.types import PolicyOutcomes

NO_INTERVAL = Interval(math.nan, math.nan)


def rate_figure(outcomes: np.ndarray, groups: np.ndarray, of: str = "episodes") -> Figure:
    """A rate of bool (E,) with Wilson's interval, n reduced where episodes share an initial state; no episode: NaN."""
    if len(outcomes) == 0:
        return figure(math.nan, wilson_interval(0, 0), 0, of)
    return figure(float(outcomes.mean()), clustered_wilson_interval(outcomes, groups), len(outcomes), of)


def majority_guess(real: np.ndarray) -> np.ndarray:
    """bool (E,): where always answering with the commoner of the real outcomes is right."""
    return real == (real.mean() > 0.5)


def difference_figure(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> Figure:
    """Mean of after minus before, bool (E,), with a paired bootstrap interval over initial states."""
    interval = paired_bootstrap_interval(before, after, clusters=groups)
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


class PolicyRates(Config):
    """One policy's success rates, real and imagined, with 95 % intervals, and how often an initial state agrees."""

    name: str
    real: Figure
    imagined: Figure
    gap: Figure
    agreement: Figure


def policy_rates(outcomes: PolicyOutcomes) -> PolicyRates:
    """The rates of one policy, over its initial states."""
    starts = np.asarray(outcomes.starts)
    real, imagined = np.asarray(outcomes.real, bool), np.asarray(outcomes.imagined, bool)
    return PolicyRates(
        name=outcomes.name,
        real=rate_figure(real, starts),
        imagined=rate_figure(imagined, starts),
        gap=difference_figure(real, imagined, starts),
        agreement=rate_figure(real == imagined, starts),
    )


def mean_maximum_rank_violation(real: np.ndarray, imagined: np.ndarray) -> np.ndarray:
    """MMRV of SIMPLER (Li et al. 2024, arXiv 2405.05941): how badly imagination orders policies.

    A pair (i, j) is violated where exactly one of imagined_i < imagined_j, real_i < real_j holds; the violation weighs
    |real_i - real_j|, so a pair that is nearly equal in reality costs little. MMRV is the mean over i of the largest
    violation over j: 0 for the right order, at most the largest real gap.

    Args:
        real, imagined: float (..., P), success rates of P policies.

    Returns:
        float (...).
    """
    gap = np.abs(real[..., :, None] - real[..., None, :])
    swapped = (imagined[..., :, None] < imagined[..., None, :]) != (real[..., :, None] < real[..., None, :])
    return (gap * swapped).max(-1).mean(-1)


def policy_figures(policies: Sequence[PolicyOutcomes]) -> dict[str, Figure]:
    """Correlations, rank violation, agreement and gap over several policies on the same initial states.

    Intervals are percentile bootstraps over initial states, each drawn for all policies at once; the policies are
    taken as given, so the interval says nothing about policies of another kind.

    Raises:
        ValueError: fewer than two policies, or other initial states for one of them.
    """
    if len(policies) < 2:
        raise ValueError(f"comparing policies needs at least two, got {len(policies)}")
    starts = list(policies[0].starts)
    tables = []
    for policy in policies:
        if len(set(policy.starts)) != len(policy.starts) or set(policy.starts) != set(starts):
            raise ValueError(
                f"policy {policy.name!r}: its {len(policy.starts)} initial states are not the {len(starts)} of "
                f"{policies[0].name!r}; every policy must start once from each of the same states, in both"
            )
        order = {start: i for i, start in enumerate(policy.starts)}
        rows = [order[start] for start in starts]
        tables.append((np.asarray(policy.real, np.float64)[rows], np.asarray(policy.imagined, np.float64)[rows]))
    real, imagined = (np.stack(part, 1) for part in zip(*tables, strict=True))  # (E, P)

    weights = resampled_counts(len(starts)) / len(starts)
    drawn = weights @ real, weights @ imagined
    statistics = {"pearson": pearson, "spearman": spearman, "mmrv": mean_maximum_rank_violation}
    figures = {}
    for name, statistic in statistics.items():
        value, draws = float(statistic(real.mean(0), imagined.mean(0))), statistic(*drawn)
        draws = draws[np.isfinite(draws)]
        usable = math.isfinite(value) and len(draws) > 0
        interval = Interval(*map(float, np.quantile(draws, [0.025, 0.975]))) if usable else NO_INTERVAL
        figures[name] = figure(value, interval, len(policies), "policies")
    groups = np.array(starts)
    for name, values in (("policy_agreement", real == imagined), ("policy_gap", imagined - real)):
        mean, low, high = mean_bands(values.mean(1, keepdims=True), groups)
        interval = Interval(float(low[0]), float(high[0]))
        figures[name] = figure(float(mean[0]), interval, len(starts), f"initial states, {len(policies)} policies")
    return figures
