"""Outcome agreement of policies between imagination and reality: rates, ranks, and the trust horizon.

An outcome is True for success. "Imagined" outcomes come from replaying logged actions, or from a policy that acts in
the world model; both are compared with the real outcome from the same initial state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vla_rl.config import Config
from vla_rl.evaluation.signal import difference_figure, informedness_figure, majority_guess, rate_figure
from vla_rl.evaluation.statistics import (
    NO_INTERVAL,
    SMALLEST,
    Figure,
    Interval,
    figure,
    mean_bands,
    pearson,
    resampled_counts,
    spearman,
)
from world_model.trust.measures.open_loop import Replay
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


# Images hold where imagination removes at least this share of the error of repeating the first frame; outcomes where
# successes are imagined as such more often than failures, by more than this.
MARGIN = 0.1
MIN_EPISODES = 20  # A frame that fewer have is not judged: the horizon ends before it.
MIN_OUTCOMES = 10  # Successes and failures that a frame needs for its outcomes to be judged by them.


def horizon_figures(replay: Replay, groups: np.ndarray, frame_steps: int) -> dict[str, Figure]:
    """Trust horizon and the two that it is the shorter of, in control steps; see `figures.FIGURES`.

    Each ends before the first frame that does not hold, or that fewer than `MIN_EPISODES` episodes have.

    Args:
        groups: (E,), initial states. frame_steps: G.
    """
    enough = replay.num_episodes >= MIN_EPISODES
    images = _frames_held(enough & images_hold(replay, MARGIN))
    held = outcomes_hold(replay.real, replay.imagined, groups, MIN_OUTCOMES, MARGIN)
    outcomes = _frames_held(enough & held)
    frames = {"image_horizon": images, "outcome_horizon": outcomes, "trust_horizon": min(images, outcomes)}
    return {name: Figure(value=frame_steps * count, n=len(groups)) for name, count in frames.items()}


def images_hold(replay: Replay, margin: float) -> np.ndarray:
    """bool (F,): imagination removes at least the share `margin` of the latent error of repeating the first frame."""
    error, copy = (np.nansum(replay.frames[name], axis=0) for name in ("latent_error", "latent_error_copy"))
    return 1 - error / np.maximum(copy, SMALLEST) >= margin


def outcomes_hold(
    real: np.ndarray, imagined: np.ndarray, groups: np.ndarray, min_outcomes: int, margin: float
) -> np.ndarray:
    """bool (F,): "has it succeeded by now?" tells successes from failures, by an informedness above `margin`.

    Errors pile up, so a frame for which a later one holds need only be no worse than a guess, or so by chance (the 95 %
    interval reaches 0). While fewer than `min_outcomes` have succeeded, or failed, informedness says little; then
    agreement may be as good as the majority guess, or worse by no more than chance.

    Args:
        real, imagined: bool (E, F), latched. groups: (E,), initial states.
    """
    guess = np.stack([majority_guess(frame) for frame in real.T], 1)
    over_guess, _, over_guess_high = mean_bands((real == imagined).astype(np.float64) - guess, groups)
    informed = [informedness_figure(*frame, groups) for frame in zip(real.T, imagined.T, strict=True)]
    telling = np.minimum(real.sum(0), (~real).sum(0)) >= min_outcomes
    shown = telling & np.array([figure.value > margin for figure in informed])
    vouched = np.maximum.accumulate(shown[::-1])[::-1]  # by this frame or a later one
    no_worse = np.array([figure.high >= 0 for figure in informed])
    return np.where(telling, shown | (vouched & no_worse), (over_guess >= 0) | (over_guess_high >= 0))


def _frames_held(holds: np.ndarray) -> int:
    return int(np.cumprod(holds).sum())
