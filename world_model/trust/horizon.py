"""The trust horizon: how long imagination holds, in images and in outcomes."""

from __future__ import annotations

import numpy as np

from world_model.trust.config import MeasureConfig
from world_model.trust.figures import Figure
from world_model.trust.intervals import SMALLEST, mean_bands
from world_model.trust.open_loop import Replay
from world_model.trust.outcomes import majority_guess


def horizon_figures(replay: Replay, groups: np.ndarray, config: MeasureConfig, frame_steps: int) -> dict[str, Figure]:
    """Trust horizon and the two that it is the shorter of, in control steps; see `figures.FIGURES`.

    Each ends before the first frame that does not hold, or that fewer than `horizon_episodes` episodes have.

    Args:
        groups: (E,), initial states. frame_steps: G.
    """
    enough = replay.num_episodes >= config.horizon_episodes
    images = _frames_held(enough & images_hold(replay, config.horizon_margin))
    outcomes = _frames_held(enough & outcomes_hold(replay.real, replay.imagined, groups, config.horizon_outcomes))
    frames = {"image_horizon": images, "outcome_horizon": outcomes, "trust_horizon": min(images, outcomes)}
    return {name: Figure(value=frame_steps * count, n=len(groups)) for name, count in frames.items()}


def images_hold(replay: Replay, margin: float) -> np.ndarray:
    """bool (F,): imagination removes at least the share `margin` of the latent error of repeating the first frame."""
    error, copy = (np.nansum(replay.frames[name], axis=0) for name in ("latent_error", "latent_error_copy"))
    return 1 - error / np.maximum(copy, SMALLEST) >= margin


def outcomes_hold(real: np.ndarray, imagined: np.ndarray, groups: np.ndarray, min_outcomes: int) -> np.ndarray:
    """bool (F,): "has it succeeded by now?" is answered better in imagination than by the majority guess.

    While fewer than `min_outcomes` have succeeded, or failed, the guess can hardly be beaten; then the answers may be
    as good, or worse by no more than chance (the 95 % interval of the difference reaches 0). The same where a later
    frame holds that can tell: errors pile up, so they were not larger before.

    Args:
        real, imagined: bool (E, F), latched. groups: (E,), initial states.
    """
    guess = np.stack([majority_guess(frame) for frame in real.T], 1)
    mean, _, high = mean_bands((real == imagined).astype(np.float64) - guess, groups)
    telling = np.minimum(real.sum(0), (~real).sum(0)) >= min_outcomes
    shown = telling & (mean > 0)
    vouched = np.maximum.accumulate(shown[::-1])[::-1]  # by this frame or a later one
    return np.where(telling & ~vouched, False, (mean >= 0) | (high >= 0))


def _frames_held(holds: np.ndarray) -> int:
    return int(np.cumprod(holds).sum())
