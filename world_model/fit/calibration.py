"""Calibration of the success thresholds on held-out episodes of the policy, with bounded false successes.

A false success is a failed episode that would count as a success, because at some frame both the success head and the
clip classifier see one. Its rate is over the failed episodes; what bounds it is the upper end of its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from vla_rl.config import Config
from vla_rl.evaluation.probability import (
    CalibrationError,
    SuccessProbability,
    check_outcomes,
    choose_threshold,
    fit_probability,
)
from vla_rl.evaluation.signal import outcome_figures, rate_figure
from vla_rl.evaluation.statistics import Figure, clustered_wilson_interval

GET_MORE = (
    "Collect more of the policy's own episodes (vla-rl collect with collect.source=policy, collect.keep=all; on a "
    "robot vla-rl deploy --record), and hold out a larger share of them (world_model.holdout) or name them in "
    "world_model.calibrate_on."
)


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
    check_outcomes(real, groups, max_false_success, min_failures, GET_MORE)
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
                f"calibration: the logits of episode {i} are not finite; fit the success head again, optim.lr lower"
            )


def threshold_values(found: SuccessCalibration) -> dict[str, Any]:
    """Of a threshold that was chosen, by the names of `WorldModelMetadata`."""
    return {
        "success_threshold": found.success_threshold,
        "clip_threshold": found.clip_threshold,
        "success_probability": _sigmoid(found.probability),
        "calibration": found.model_dump(mode="json"),
        "no_threshold": "",
    }


def no_threshold(score: np.ndarray, succeeded: Sequence[bool], starts: Sequence[str], reason: str) -> dict[str, Any]:
    """Without a threshold that can be vouched for: the probability, and a verdict above a half of it.

    Args:
        score: float64 (E,), of each episode, as `Logits.score`.
        succeeded: bool (E,), real outcomes. starts: (E,), names of the initial states.
        reason: why there is none.
    """
    found = fit_probability(score, np.asarray(succeeded, bool), np.asarray(starts))
    half = 0.0 if found is None else -found.intercept / found.slope
    return {
        "success_threshold": half,
        "clip_threshold": half,
        "success_probability": _sigmoid(found),
        "calibration": {} if found is None else {"probability": found.model_dump(mode="json")},
        "no_threshold": reason,
    }


def _sigmoid(found: SuccessProbability | None) -> tuple[float, float] | None:
    return None if found is None else (found.slope, found.intercept)
