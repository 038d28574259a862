"""Do several policies do in imagination as they do in reality? Rates, correlations, rank violation and agreement.

An outcome is True for success. "Imagined" outcomes come from replaying logged actions, or from a policy that acts in
the world model; both are compared with the real outcome from the same initial state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vla_rl.config import Config
from vla_rl.evaluation.bootstrap import mean_bands, resampled_counts
from vla_rl.evaluation.figure import NO_INTERVAL, Figure, figure
from vla_rl.evaluation.outcomes import difference_figure, rate_figure
from vla_rl.evaluation.statistics import Interval, pearson, spearman
from world_model.trust.types import PolicyOutcomes


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
