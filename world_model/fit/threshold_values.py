"""What a fit writes into a world model's metadata of its threshold: the one that was chosen, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.evaluation.probability import SuccessProbability, fit_probability
from world_model.fit.calibration import SuccessCalibration


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
