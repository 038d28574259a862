"""Measurement of trust: every figure, curve and clip of the trust report.

measured = measure(world_model, TrustData(held_out=episodes), MeasureConfig())
measured.report.check(TrustConfig().require)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from vla_rl.evaluation.signal import (
    Calibration,
    auc_figure,
    calibration,
    calibration_interval,
    group_correlation,
    majority_guess,
    outcome_figures,
    rate_figure,
)
from vla_rl.evaluation.statistics import NO_INTERVAL, Figure, Interval, figure, ratio_interval
from world_model.trust.config import MeasureConfig
from world_model.trust.measures.actions import ActionReader
from world_model.trust.measures.metrics import MIN_SSIM_SIDE, Curve, drift_curve
from world_model.trust.measures.open_loop import (
    OTHER_ACTIONS,
    Noise,
    Replay,
    action_errors,
    imagine,
    object_figures,
    probability_ahead,
    replay,
)
from world_model.trust.measures.outcomes import MIN_EPISODES, horizon_figures, policy_figures, policy_rates
from world_model.trust.measures.perceptual import Lpips, VideoFeatures, frechet_distance
from world_model.trust.report import Provenance, TrustReport
from world_model.trust.types import TrustData, WorldModel, check_episodes
from world_model.types import LoggedEpisode, collate

POLICY_FIGURES = ("pearson", "spearman", "mmrv", "policy_agreement", "policy_gap")
_INVERSE_FIGURES = ("inverse_error_real", "inverse_error_imagined", "inverse_error_ratio")
_CALIBRATION_BINS = 10
NO_GROUPS = (
    "no two held-out episodes share an initial state; collect them in groups (loop.held_out_group, collect.group_size)"
)
SEED = 0  # Of the world model's noise and of the actions swapped in.
BATCH_SIZE = 16  # Episodes imagined at a time; the figures do not depend on it.
ACTION_FRAMES = 6  # Imagined with other actions; later ones are off anyhow.
NUM_CLIPS = 3  # Imagined-beside-real clips of each kind: success, failure, false and missed success.
PERCEPTUAL_WEIGHTS = ("alexnet-owt-7be5be79.pth", "alex.pth", "r3d_18-b3b3357e.pth")
_SIMPLE_MEANS = ("state_error", "latent_error", "psnr", "psnr_reconstruction", "psnr_copy", "ssim", "lpips")


@dataclass(frozen=True)
class Clip:
    """One episode, real and imagined.

    Attributes:
        kind: "success", "failure", "false success" or "missed success".
        real, imagined: uint8 (T, V, height, width, 3); frame 0 is real in both.
    """

    kind: str
    start: str
    instruction: str
    real: np.ndarray
    imagined: np.ndarray


@dataclass(frozen=True)
class Measured:
    """The report, without its clips' files, and the clips."""

    report: TrustReport
    clips: tuple[Clip, ...]


def measure(
    world_model: WorldModel,
    data: TrustData,
    config: MeasureConfig,
    provenance: Provenance | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> Measured:
    """Measure everything that the data and the weights at hand allow; the report says what was not, and why.

    The same data, config and world model give the same figures.

    Args:
        provenance: of the world model and the data, kept in the report.
        on_stage: called with a few words before each stage.

    Raises:
        ValueError: no held-out episodes, episodes of another shape than promised or cut for another world model,
            policies on different initial states, weights that cannot be read, or a world model that imagines NaN.
    """
    say = on_stage or (lambda _: None)
    check_episodes(data.held_out, world_model.frame_steps, "trust: held-out episodes")
    if data.train:
        check_episodes(data.train, world_model.frame_steps, "trust: training episodes")
    for style, episodes in data.styles.items():
        check_episodes(episodes, world_model.frame_steps, f"trust: style {style!r}")
    not_measured: dict[str, str] = {}
    lpips, video = _perceptual(config, not_measured)

    say(f"imagining {len(data.held_out)} held-out episodes, twice")
    groups = _groups(data.held_out)
    noise, other_noise = Noise(SEED), Noise(SEED, 1)
    done = replay(world_model, data.held_out, BATCH_SIZE, noise, lpips, video, other_noise)
    figures = replay_figures(done, groups)
    calibrations = _calibrations(done)
    figures |= _calibration_figures(calibrations, done, groups)
    figures |= _signal_figures(done, groups, not_measured)
    if config.auc_frames:
        say(f"the same from real frames up to {config.auc_frames} before each")
        figures |= _ahead_figures(world_model, data.held_out, config)
    figures |= object_figures(world_model, data.held_out, BATCH_SIZE, SEED, not_measured)
    say("the same with other actions")
    figures |= _action_figures(world_model, data, config, not_measured)
    figures |= _horizons(done, groups, world_model.frame_steps, not_measured)
    figures |= _acting_figures(data, not_measured)
    if "ssim" not in figures:
        not_measured["ssim"] = f"the images are smaller than {MIN_SSIM_SIDE} x {MIN_SSIM_SIDE} pixels"
    styles: dict[str, dict[str, Figure]] = {}
    for style, episodes in data.styles.items():
        say(f"style {style}: imagining {len(episodes)} episodes")
        seen = replay(world_model, episodes, BATCH_SIZE, Noise(SEED), lpips, video)
        styles[style] = _style_figures(seen, _groups(episodes))
    report = TrustReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=provenance or Provenance(),
        config=config,
        frame_steps=world_model.frame_steps,
        figures=figures,
        styles=styles,
        curves=_curves(done, groups, world_model.frame_steps),
        calibrations=calibrations,
        policies=tuple(policy_rates(policy) for policy in data.policies),
        not_measured=not_measured,
    )
    return Measured(report, _clips(world_model, data.held_out, done, config))


def _acting_figures(data: TrustData, not_measured: dict[str, str]) -> dict[str, Figure]:
    """Figures of policies that acted in both: several, and the one that RL starts from."""
    figures = {}
    if len(data.policies) > 1:
        figures |= policy_figures(data.policies)
    else:
        not_measured |= dict.fromkeys(POLICY_FIGURES, f"it needs at least two policies, got {len(data.policies)}")
    if (acting := data.acting) is None:
        none = "no held-out episodes of the recipe's own policy, from an environment's states"
        not_measured |= dict.fromkeys(("acting_gap", "acting_auc", "acting_order"), none)
        return figures
    figures["acting_gap"] = policy_rates(acting).gap
    if acting.worth is None or acting.caused is None:
        none = "`vla-rl world-model eval` measures it where env.first_frames is a simulator"
        not_measured |= dict.fromkeys(("acting_auc", "acting_order"), none)
        return figures
    groups = np.unique(np.asarray(acting.starts), return_inverse=True)[1]
    figures["acting_auc"] = auc_figure(acting.worth, acting.caused, groups)
    if (order := group_correlation(acting.worth, acting.caused, groups)) is None:
        not_measured["acting_order"] = NO_GROUPS
    else:
        figures["acting_order"] = order
    return figures


def replay_figures(done: Replay, groups: np.ndarray) -> dict[str, Figure]:
    """Outcomes and images of replayed episodes.

    Args:
        groups: (E,), initial states.
    """
    real, figures = done.real[:, -1], outcome_figures(done.real[:, -1], done.imagined[:, -1], groups)
    figures["head_agreement"] = rate_figure(done.head == real, groups)
    figures["head_false_success"] = rate_figure(done.head[~real], groups[~real], "failed episodes")
    total = {name: np.nansum(values, axis=1) for name, values in done.frames.items()}
    count = np.isfinite(done.frames["latent_error"]).sum(1).astype(np.float64)
    for name in _SIMPLE_MEANS:
        if name in total:
            figures[name] = figure(*ratio_interval(total[name], count, groups), len(groups))
    left, interval = ratio_interval(total["latent_error"], total["latent_error_copy"], groups)
    figures["skill"] = figure(1 - left, Interval(1 - interval.high, 1 - interval.low), len(groups))
    if done.imagined_again is not None:
        figures["outcome_flips"] = rate_figure(done.imagined_again != done.imagined[:, -1], groups)
        # Were a future drawn as reality is, two of them would lie as far apart as one lies from what happened.
        share, ends = ratio_interval(total["latent_spread"], total["latent_error"], groups)
        figures["spread"] = figure(math.sqrt(share), Interval(*map(math.sqrt, ends)), len(groups))
    if done.features is not None and len(done.features[0]) > 1:
        figures["fvd"] = figure(frechet_distance(*done.features), NO_INTERVAL, len(done.features[0]), "clips")
    return figures


def _action_figures(
    world_model: WorldModel, data: TrustData, config: MeasureConfig, not_measured: dict[str, str]
) -> dict[str, Figure]:
    """Figures of `figures.ACTIONS`. The inverse dynamics is judged on episodes that it was not trained on."""
    inverse, judged = _inverse_dynamics(world_model, data, config, not_measured)
    groups = _groups(data.held_out)
    errors = action_errors(world_model, data.held_out, BATCH_SIZE, ACTION_FRAMES, SEED, inverse)

    def ratio(above: str, below: str, rows: np.ndarray) -> Figure:
        return figure(*ratio_interval(errors[above][rows], errors[below][rows], groups[rows]), int(rows.sum()))

    everywhere = np.ones(len(groups), bool)
    names = dict(zip(OTHER_ACTIONS, ("action_gain", "action_gain_zero", "action_gain_random"), strict=True))
    figures = {name: ratio(kind, "true", everywhere) for kind, name in names.items()}
    figures["action_response"] = ratio("response", "true", everywhere)
    if inverse is not None:
        frames = [(e.executed[1 : ACTION_FRAMES + 1].any(1)).sum() for e in data.held_out]
        errors["count"] = np.array(frames, np.float64)
        figures["inverse_error_real"] = ratio("inverse_real", "count", judged)
        figures["inverse_error_imagined"] = ratio("inverse_imagined", "count", judged)
        figures["inverse_error_ratio"] = ratio("inverse_imagined", "inverse_real", judged)
    return figures


def _inverse_dynamics(
    world_model: WorldModel, data: TrustData, config: MeasureConfig, not_measured: dict[str, str]
) -> tuple[ActionReader | None, np.ndarray]:
    """The network, trained on `data.train` or on half of the initial states; and which held-out episodes judge it."""
    judged = np.ones(len(data.held_out), bool)
    train: Sequence[LoggedEpisode] = data.train
    if not train:
        states = np.unique(_groups(data.held_out), return_inverse=True)[1]
        judged = states % 2 == 0
        train = [e for e, kept in zip(data.held_out, judged, strict=True) if not kept]
    if not config.inverse_updates or not train:
        why = (
            "world_model.measure.inverse_updates is 0" if train else "it needs episodes of at least two initial states"
        )
        not_measured |= dict.fromkeys(_INVERSE_FIGURES, why)
        return None, judged
    return ActionReader(world_model, train, config.inverse_updates, SEED), judged


def _perceptual(config: MeasureConfig, not_measured: dict[str, str]) -> tuple[Lpips | None, VideoFeatures | None]:
    lpips = video = None
    alexnet, linear, r3d = ((config.perceptual_weights or Path()) / name for name in PERCEPTUAL_WEIGHTS)
    if config.perceptual_weights and alexnet.is_file() and linear.is_file():
        lpips = Lpips(alexnet, linear)
    else:
        not_measured["lpips"] = f"no {alexnet.name} and {linear.name} in world_model.measure.perceptual_weights"
    if config.perceptual_weights and r3d.is_file():
        video = VideoFeatures(r3d)
    else:
        not_measured["fvd"] = f"no {r3d.name} in world_model.measure.perceptual_weights"
    return lpips, video


def _calibrations(done: Replay) -> dict[str, Calibration]:
    real = done.real[:, -1]
    return {
        "imagined": calibration(done.probability, real, _CALIBRATION_BINS),
        "real": calibration(done.head_probability, real, _CALIBRATION_BINS),
    }


def _calibration_figures(calibrations: dict[str, Calibration], done: Replay, groups: np.ndarray) -> dict[str, Figure]:
    real, count = done.real[:, -1], len(groups)
    seen = {
        "imagined": ("calibration_error", done.probability),
        "real": ("head_calibration_error", done.head_probability),
    }
    return {
        name: figure(
            calibrations[kind].error, calibration_interval(probability, real, groups, _CALIBRATION_BINS), count
        )
        for kind, (name, probability) in seen.items()
    }


def _style_figures(seen: Replay, groups: np.ndarray) -> dict[str, Figure]:
    figures = replay_figures(seen, groups) | _signal_figures(seen, groups, {})
    return figures | _calibration_figures(_calibrations(seen), seen, groups)


def _horizons(done: Replay, groups: np.ndarray, frame_steps: int, not_measured: dict[str, str]) -> dict[str, Figure]:
    if len(groups) >= MIN_EPISODES:
        return horizon_figures(done, groups, frame_steps)
    why = f"{len(groups)} held-out episodes, it needs {MIN_EPISODES}"
    not_measured |= dict.fromkeys(("trust_horizon", "image_horizon", "outcome_horizon"), why)
    return {}


def _ahead_figures(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], config: MeasureConfig
) -> dict[str, Figure]:
    """AUC 1, 2, ... frames after a real one."""
    ahead = probability_ahead(world_model, episodes, BATCH_SIZE, config.auc_frames, SEED)
    real, groups = np.array([episode.succeeded for episode in episodes]), _groups(episodes)
    return {f"auc_after_{number}": auc_figure(found, real, groups) for number, found in enumerate(ahead.T, start=1)}


def _signal_figures(done: Replay, groups: np.ndarray, not_measured: dict[str, str]) -> dict[str, Figure]:
    """AUC in imagination and on real frames, and the order within initial states that have several episodes."""
    real = done.real[:, -1]
    figures = {
        "auc": auc_figure(done.probability, real, groups),
        "head_auc": auc_figure(done.head_probability, real, groups),
    }
    rewards = {"group_correlation": done.probability, "group_correlation_verdict": done.imagined[:, -1]}
    for name, reward in rewards.items():
        found = group_correlation(reward, real, groups)
        if found is None:
            not_measured[name] = NO_GROUPS
        else:
            figures[name] = found
    if done.disagreement is not None:
        wrong, count = done.imagined[:, -1] != real, np.ones(len(groups))
        figures["disagreement"] = figure(*ratio_interval(done.disagreement, count, groups), len(groups))
        kinds = ("episodes with a wrong verdict", "episodes with a right verdict")
        figures["disagreement_auc"] = auc_figure(done.disagreement, wrong, groups, kinds)
    return figures


def _curves(done: Replay, groups: np.ndarray, frame_steps: int) -> dict[str, Curve]:
    """Means by frame; see `TrustReport.curves`."""
    guess = np.stack([majority_guess(frame) for frame in done.real.T], 1)
    outcomes = {
        "real_success": done.real,
        "imagined_success": done.imagined,
        "outcome_agreement": done.real == done.imagined,
        "outcome_majority": guess,
    }
    tables = done.frames | {name: values.astype(np.float64) for name, values in outcomes.items()}
    return {name: drift_curve(values, groups, frame_steps) for name, values in tables.items()}


def _clips(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], done: Replay, config: MeasureConfig
) -> tuple[Clip, ...]:
    """Some episodes of each kind, of several tasks, imagined once more with the same noise, to be looked at."""
    real, imagined = done.real[:, -1], done.imagined[:, -1]
    kinds = {
        "success": real & imagined,
        "failure": ~real & ~imagined,
        "false success": ~real & imagined,
        "missed success": real & ~imagined,
    }
    clips = []
    for kind, found in kinds.items():
        rows = np.flatnonzero(found)  # The episodes lie task by task: take some at equal distances.
        distance = max(1, len(rows) // NUM_CLIPS)
        for row in rows[::distance][:NUM_CLIPS].tolist():
            batch = collate([episodes[row]])
            first = world_model.encode(batch.images[:, :1], batch.states[:, :1])
            shown, _ = imagine(world_model, batch, first, Noise(SEED).of([row]))
            frames = np.concatenate([batch.images[0, :1], world_model.decode(shown)[0]])
            clips.append(Clip(kind, episodes[row].start, episodes[row].instruction, batch.images[0], frames))
    return tuple(clips)


def _groups(episodes: Sequence[LoggedEpisode]) -> np.ndarray:
    return np.array([e.start for e in episodes])
