"""The trust horizon: how long imagination holds, in images and in outcomes."""

from __future__ import annotations

import numpy as np

from vla_rl.evaluation.bootstrap import SMALLEST, mean_bands
from vla_rl.evaluation.figure import Figure
from vla_rl.evaluation.outcomes import informedness_figure, majority_guess
from world_model.trust.measures.open_loop import Replay

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
