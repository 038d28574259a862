"""The thresholds of success: chosen on held-out episodes of the policy, so that false successes are bounded.

A false success is a failed episode that would count as a success, because at some frame both the success head and the
clip classifier see one. Its rate is over the failed episodes; what bounds it is the upper end of its 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from pydantic import FiniteFloat

from vla_rl.config import Config
from vla_rl.evaluation.statistics import clustered_wilson_interval, wilson_interval
from world_model.fit.probability import SuccessProbability, fit_probability
from world_model.trust.figures import Figure
from world_model.trust.measures.outcomes import outcome_figures, rate_figure

GET_MORE = (
    "Collect more of the policy's own episodes (vla-rl collect with collect.source=policy, collect.keep=all), and hold "
    "out a larger share of them (world_model.holdout) or name them in world_model.calibrate_on."
)


class CalibrationError(ValueError):
    """No threshold can be vouched for."""


class SuccessCalibration(Config):
    """The thresholds, and what they give on the held-out episodes.

    Attributes:
        success_threshold, clip_threshold: logits above which the success head and the clip classifier see a success.
        max_false_success: the bound that was asked for.
        figures: agreement, false_success, precision, recall and others, with intervals; see
            `world_model.trust.figures.FIGURES`.
        success_alone, clip_alone: false-success rate if one alone decided, at the same threshold.
        probability: what the higher of the scores means, without a threshold; None where higher does not mean likelier.
        num_episodes, num_failures: held out.
    """

    success_threshold: FiniteFloat
    clip_threshold: FiniteFloat
    max_false_success: float
    figures: dict[str, Figure]
    success_alone: Figure
    clip_alone: Figure
    probability: SuccessProbability | None = None
    num_episodes: int
    num_failures: int


def failures_needed(max_false_success: float) -> int:
    """Failed episodes with which a rate of 0 has an upper 95 % limit (Wilson) of at most `max_false_success`."""
    enough = 1
    while wilson_interval(0, enough).high > max_false_success:
        enough += 1
    return enough


def calibrate(
    success_logits: Sequence[np.ndarray],
    clip_logits: Sequence[np.ndarray],
    succeeded: Sequence[bool] | np.ndarray,
    starts: Sequence[str] | None = None,
    max_false_success: float = 0.1,
    min_failures: int = 40,
) -> SuccessCalibration:
    """Choose one threshold for both networks, whose logits are both of a probability; see `choose_threshold`.

    An episode's score is the highest over its frames of the lower of the two logits: above the threshold, it counts.

    Args:
        success_logits, clip_logits: for each of E episodes, float (frames,), the initial frame left out.
        succeeded: bool (E,), real outcomes.
        starts: (E,), names of the initial states; None: each its own. Episodes from one state count for less.
        max_false_success: bound of the upper 95 % limit of the false-success rate.
        min_failures: failed episodes, from different initial states, needed at least.

    Raises:
        CalibrationError: too few failures, no success, or none that counts at any threshold where the bound holds.
        ValueError: lists that do not match, an episode without frames, or logits that are not finite.
    """
    real = np.asarray(succeeded, bool)
    groups = np.arange(len(real)) if starts is None else np.asarray(starts)
    _check_logits(success_logits, clip_logits, real, groups)
    check_outcomes(real, groups, max_false_success, min_failures)
    score = _highest([np.minimum(*pair) for pair in zip(success_logits, clip_logits, strict=True)])
    threshold = choose_threshold(score, real, groups, max_false_success)
    if threshold is None:
        best = clustered_wilson_interval(score[~real] >= score[real].max(), groups[~real]).high
        raise CalibrationError(
            f"calibration: no threshold keeps the false-success rate's upper 95 % limit at {max_false_success:.0%} or "
            f"below and lets any of the {real.sum()} successful episodes count; the best that lets one count reaches "
            f"{best:.0%}. The success head cannot tell success from failure: fit it longer or on more episodes of the "
            "policy, near-successes included, or accept more with world_model.max_false_success."
        )
    imagined = score > threshold
    success_alone, clip_alone = (
        rate_figure((_highest(logits) > threshold)[~real], groups[~real], "failed episodes")
        for logits in (success_logits, clip_logits)
    )
    return SuccessCalibration(
        success_threshold=threshold,
        clip_threshold=threshold,
        max_false_success=max_false_success,
        figures=outcome_figures(real, imagined, groups),
        success_alone=success_alone,
        clip_alone=clip_alone,
        probability=fit_probability(score, real, groups),
        num_episodes=len(real),
        num_failures=int((~real).sum()),
    )


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


def _highest(logits: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([episode.max() for episode in logits], np.float64)


def _check_logits(
    success_logits: Sequence[np.ndarray], clip_logits: Sequence[np.ndarray], real: np.ndarray, groups: np.ndarray
) -> None:
    counts = (len(success_logits), len(clip_logits), len(real), len(groups))
    if len(set(counts)) > 1:
        raise ValueError(f"calibration: needs as many logits, outcomes and starts as episodes, got {counts}")
    for i, (success, clip) in enumerate(zip(success_logits, clip_logits, strict=True)):
        if success.ndim != 1 or success.size == 0 or success.shape != clip.shape:
            raise ValueError(
                f"calibration: episode {i} needs one logit of each network per frame, found {success.shape} and "
                f"{clip.shape}"
            )
        if not (np.isfinite(success).all() and np.isfinite(clip).all()):
            raise ValueError(
                f"calibration: the logits of episode {i} are not finite; fit the success head again with a lower lr"
            )


def check_outcomes(real: np.ndarray, groups: np.ndarray, max_false_success: float, min_failures: int) -> None:
    """Check that held-out episodes can bound the false-success rate, whatever the networks say of them.

    Args:
        real: bool (E,), outcomes. groups: (E,), initial states.

    Raises:
        CalibrationError: too few failures, or no success.
    """
    found, needed = len(np.unique(groups[~real])), max(min_failures, failures_needed(max_false_success))
    if found < needed:
        raise CalibrationError(
            f"calibration: {found} failed episodes from different initial states among {len(real)} held-out episodes, "
            f"{needed} are needed to bound the false-success rate at {max_false_success:.0%}. {GET_MORE}"
        )
    if not real.any():
        raise CalibrationError(
            f"calibration: none of the {len(real)} held-out episodes succeeded, so nothing tells what a success looks "
            f"like. {GET_MORE}"
        )
