"""Evaluation of a learned reward on episodes and policies that it has not seen."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.outcomes import Calibration, calibration, outcome_figures
from vla_rl.evaluation.signal import auc_figure, calibration_interval
from vla_rl.evaluation.statistics import Figure, Interval, figure, mean_bands, spearman
from vla_rl.rewards.base import Judgement
from vla_rl.rewards.fit import frame_logits, highest, progress_target
from vla_rl.rewards.frames import RewardFrames
from vla_rl.rewards.model import STATES_FILE, LearnedReward

RESULT_FILE, PAGE_FILE = "reward.json", "reward.html"
NUM_BINS = 10
ALL = "all"
# Name -> what it is, as tables and the page head it, and in plain words.
FIGURES = {
    "auc": (
        "AUC",
        "Of a success and a failure: how often the success had the higher probability, each at its highest.",
    ),
    "calibration_error": ("calibration error", "How far from a probability of success the share of successes is."),
    "false_success": (
        "false successes",
        "Of the failed episodes, how many count as a success. RL finds and repeats these.",
    ),
    "missed_success": ("missed successes", "Of the successful episodes, how many never count."),
    "agreement": ("agreement", "Episodes that count as what they were."),
    "progress_rank": (
        "progress, rank",
        "Spearman's correlation of progress and the steps behind, within each successful episode up to its success.",
    ),
    "progress_error": ("progress, error", "How far from progress the way behind is, on average, over all frames."),
    "real_success": ("success", "Episodes that succeeded."),
}


class RewardResult(Config):
    """What `measure` found: figures by task and pooled ("all"), and the curve of calibration.

    Attributes:
        figures: task -> name (`FIGURES`) -> figure. curve: of all episodes' highest probability.
        num_episodes, num_failures, num_initial_states: measured on. max_false_success: the bound asked for when the
            threshold was chosen.
        policies: that acted here. fitted_on: that acted in what it was fitted on.
        weights: the reward's fingerprint.
    """

    figures: dict[str, dict[str, Figure]]
    curve: Calibration
    num_episodes: int
    num_failures: int
    num_initial_states: int
    max_false_success: float
    policies: tuple[str, ...]
    fitted_on: tuple[str, ...]
    weights: str

    @property
    def seen_policies(self) -> list[str]:
        """Policies that it was fitted on, too."""
        return sorted(set(self.policies) & set(self.fitted_on))

    def summary(self) -> str:
        """n, and who acted, in a sentence."""
        text = (
            f"{self.num_episodes} episodes from {self.num_initial_states} initial states, {self.num_failures} of them "
            f"failures; policies: {', '.join(self.policies)}"
        )
        return text + (f" (also fitted on: {', '.join(self.seen_policies)})" if self.seen_policies else "")

    def rows(self) -> list[tuple[str, list[str]]]:
        """Task and its figures as text, the pooled ones last."""
        order = sorted(self.figures, key=lambda task: task == ALL)
        return [(task, [as_text(self.figures[task].get(name)) for name in FIGURES]) for task in order]

    def table(self) -> Table:
        """The figures for a terminal."""
        table = Table(title=self.summary(), title_justify="left")
        table.add_column("task")
        for title, _ in FIGURES.values():
            table.add_column(title, justify="right")
        for task, cells in self.rows():
            table.add_row(task, *cells)
        return table

    def save(self, folder: Path) -> Path:
        """Write reward.json; returns its path."""
        write_text_atomic(folder / RESULT_FILE, self.model_dump_json(indent=1) + "\n")
        return folder / RESULT_FILE


@dataclass(frozen=True)
class Judged:
    """What a reward says of M frames: `said`; and episode by episode the highest, float32 (E,), and bool (E,)."""

    said: Judgement
    probability: np.ndarray
    counts: np.ndarray


def as_text(found: Figure | None) -> str:
    """ "0.93 [0.91, 0.95]", or a dash where there is none."""
    if found is None or math.isnan(found.value):
        return "-"
    return f"{found.value:.3f}" + ("" if math.isnan(found.low) else f" [{found.low:.3f}, {found.high:.3f}]")


def judge_frames(model: LearnedReward, frames: RewardFrames) -> Judged:
    """Judge recorded episodes, as a stream of each would be."""
    facts = model.facts
    success, progress = frame_logits(model.network, frames, facts.cameras, facts.image_size, facts.state_dim)
    said = model.judge(success, progress)
    return Judged(said, highest(said.success, frames), highest(said.counts.astype(np.float32), frames) > 0)


def measure(folder: Path, model: LearnedReward, frames: RewardFrames) -> tuple[RewardResult, Judged]:
    """Measure a reward on episodes from initial states that it has not seen.

    Args:
        folder: of the reward.

    Raises:
        ValueError: it has seen some of their initial states, or all ended alike.
    """
    _check_unseen(folder, model, frames)
    real = frames.success
    if real.all() or not real.any():
        raise ValueError(
            f"reward.evaluate_on: all {len(real)} episodes {'succeeded' if real.all() else 'failed'}; measuring needs "
            "both kinds. Evaluate on more episodes, or on those of another policy"
        )
    judged = judge_frames(model, frames)
    figures = {ALL: _figures(model, frames, judged, np.ones(len(frames), bool))}
    tasks = list(dict.fromkeys(frames.tasks.tolist()))
    if len(tasks) > 1:
        figures = {task: _figures(model, frames, judged, frames.tasks == task) for task in tasks} | figures
    result = RewardResult(
        figures=figures,
        curve=calibration(judged.probability, real, NUM_BINS),
        num_episodes=len(frames),
        num_failures=int((~real).sum()),
        num_initial_states=len(np.unique(frames.starts)),
        max_false_success=model.facts.max_false_success,
        policies=frames.policies,
        fitted_on=model.facts.policies,
        weights=model.facts.weights,
    )
    return result, judged


def _check_unseen(folder: Path, model: LearnedReward, frames: RewardFrames) -> None:
    seen = set(json.loads((folder / STATES_FILE).read_text(encoding="utf-8")))
    if shared := sorted(seen & set(frames.starts.tolist())):
        raise ValueError(
            f"reward.evaluate_on: {len(shared)} initial states, such as {shared[0]}, are among those that the reward "
            "was fitted on; figures would be too good. Set another dataset, start_index or split"
        )
    fitted_on = {content: path for path, content in model.facts.datasets.items()}
    for data in frames.parts:  # A recording's states have its path in their names, which may be written otherwise.
        if (path := fitted_on.get(LeRobotSource(data.path).fingerprint())) is not None:
            raise ValueError(
                f"reward.evaluate_on: {data.path} holds what the reward was fitted on, as {path}; figures would be too "
                "good. Set another dataset"
            )


def _figures(model: LearnedReward, frames: RewardFrames, judged: Judged, chosen: np.ndarray) -> dict[str, Figure]:
    """Of the episodes where bool (E,)."""
    real, starts = frames.success[chosen], frames.starts[chosen]
    probability = judged.probability[chosen].astype(np.float64)
    found = outcome_figures(real, judged.counts[chosen], starts)
    error = calibration(probability, real, NUM_BINS).error
    inside = chosen[frames.owner]
    progress = judged.said.progress[inside].astype(np.float64)
    target = progress_target(frames, model.facts.longest_steps)[inside].astype(np.float64)
    states = frames.starts[frames.owner[inside]]
    return {
        "auc": auc_figure(probability, real, starts),
        "calibration_error": figure(error, calibration_interval(probability, real, starts, NUM_BINS), len(real)),
        **{name: found[name] for name in ("false_success", "missed_success", "agreement", "real_success")},
        "progress_rank": progress_rank(judged.said.progress, frames, chosen),
        "progress_error": figure(
            _expected_error(progress, target), calibration_interval(progress, target, states, NUM_BINS), len(real)
        ),
    }


def progress_rank(progress: np.ndarray, frames: RewardFrames, chosen: np.ndarray) -> Figure:
    """Mean over successful episodes of Spearman's correlation of progress and the steps behind, up to the success.

    Args:
        progress: float (M,). chosen: bool (E,), episodes.
    """
    before = frames.step <= frames.steps_to_success[frames.owner]
    found, starts = [], []
    for episode in np.flatnonzero(chosen & frames.success):
        rows = np.flatnonzero((frames.owner == episode) & before)
        if len(rows) > 2 and np.ptp(progress[rows]) > 0:
            found.append(float(spearman(progress[rows], frames.step[rows])))
            starts.append(frames.starts[episode])
    if not found:
        return figure(math.nan, Interval(math.nan, math.nan), 0, "successful episodes")
    value, low, high = mean_bands(np.array(found)[:, None], np.array(starts))
    return figure(float(value[0]), Interval(float(low[0]), float(high[0])), len(found), "successful episodes")


def _expected_error(value: np.ndarray, target: np.ndarray) -> float:
    """Mean over frames of |mean value - mean target| of the frame's bin; see `outcomes.calibration`."""
    place = np.minimum((value * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return float(np.abs(np.bincount(place, value - target)).sum() / len(value))
