"""Fit every score on one set of episodes, calibrate its band on another, and save the detectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from real_robot.failure.config import FailureConfig
from real_robot.failure.conformal import MIN_SHAPE, Band, CalibrationError, successes_needed
from real_robot.failure.detector import FailureDetector, Identity, scorer_classes
from real_robot.failure.scorer import Scorer
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.embeddings import EmbeddedEpisodes

DETECTORS, EPISODES_FILE = "detectors", "episodes.json"
MIN_SUCCESSES = 10  # To fit a score on.


def fit(
    config: FailureConfig,
    train: EmbeddedEpisodes,
    calibration: EmbeddedEpisodes,
    folder: Path,
    *,
    policy_name: str,
    seed: int = 0,
    show: Callable[[str], None] | None = None,
) -> list[Path]:
    """Write one detector for each of `config.detectors` into `folder`/detectors; returns their folders.

    Scores that learn from failures are left out, and said so, where fewer than `config.min_failures` are recorded.

    Raises:
        CalibrationError: too few successes for alpha, or from too few initial states; there is no detector then.
        ValueError: the two sets share initial states, or differ in the policy.
    """
    say = show or (lambda text: None)
    check_disjoint(train, calibration, "failure.fit_on", "failure.calibrate_on")
    EmbeddedEpisodes.concatenate([train.select(np.arange(1)), calibration.select(np.arange(1))])  # Of one policy.
    num_successes = int(train.success.sum())
    needed = successes_needed(config.alpha) + MIN_SHAPE
    successes = calibration.select(calibration.success)
    if num_successes < MIN_SUCCESSES or len(successes) < needed:
        raise CalibrationError(
            f"the policy succeeded in {num_successes} of {len(train)} episodes to fit on and {len(successes)} of "
            f"{len(calibration)} to calibrate on; a detector needs {MIN_SUCCESSES} and, for alpha={config.alpha:g}, "
            f"{needed}. Record more episodes, or accept more false alarms (failure.alpha); a policy that never "
            "succeeds has no detector."
        )
    num_states = len(set(successes.initial_states))
    if num_states < needed:
        raise CalibrationError(
            f"the {len(successes)} successes to calibrate on begin in {num_states} initial states; those of one state "
            f"go together, so that alpha={config.alpha:g} needs {needed} states. Record from more of them, or accept "
            "more false alarms (failure.alpha)"
        )
    for kind in config.detectors:
        scorer_classes()[kind].check_installed()
    identity = Identity(train.policy_hash, policy_name, train.dim, train.every)
    states = {"fit_on": sorted(set(train.initial_states)), "calibrate_on": sorted(set(calibration.initial_states))}
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / EPISODES_FILE, json.dumps(states, indent=1))
    written = []
    for number, kind in enumerate(config.detectors):
        scorer_class = scorer_classes()[kind]
        num_failures = len(train) - num_successes
        if scorer_class.needs_failures and num_failures < config.min_failures:
            say(f"{kind}: left out, it learns from failures; {num_failures} recorded, needs {config.min_failures}")
            continue
        scorer = scorer_class.fit(config.of(kind), train, seed + number)
        curves = scorer.curves(successes)
        band = Band.fit(curves, successes.instructions, config.alpha, seed, kind=config.of(kind).band)
        target = folder / DETECTORS / kind
        FailureDetector(scorer, band, identity).save(target)
        written.append(target)
        seen, failures = _share_of_alarms(scorer, band, calibration), len(calibration) - len(successes)
        say(
            f"{kind}: fitted on {len(train)} episodes, threshold from {band.num_successes} successes"
            + (f"; alarms in {100 * seen:.0f} % of the {failures} failures to calibrate on" if failures else "")
        )
    if not written:
        raise CalibrationError("failure.detectors: none could be fitted; add one that learns from successes alone")
    return written


def _share_of_alarms(scorer: Scorer, band: Band, episodes: EmbeddedEpisodes) -> float:
    """Share of the failures that have an alarm: what an alpha costs, without looking at held-out episodes."""
    failures = episodes.select(~episodes.success)
    pairs = zip(scorer.curves(failures), failures.instructions, strict=True)
    alarms = [band.standing(curve, instruction).max() > band.q for curve, instruction in pairs]
    return float(np.mean(alarms)) if alarms else 0.0


def check_disjoint(a: EmbeddedEpisodes, b: EmbeddedEpisodes, name_a: str, name_b: str) -> None:
    """Raise ValueError if two sets hold episodes from the same initial state."""
    if shared := sorted(set(a.initial_states) & set(b.initial_states)):
        raise ValueError(
            f"{name_a} and {name_b} share {len(shared)} initial states, such as {shared[0]}; thresholds and figures "
            "would be too good. Give them other datasets, or another start_index or split"
        )
