"""Success threshold of a score, chosen on held-out episodes so that false successes are bounded.

A false success is a failed episode that counts as a success. Its rate is over the failed episodes; what bounds it is
the upper end of its 95 % interval.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from vla_rl.evaluation.statistics import clustered_wilson_interval, wilson_interval


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
