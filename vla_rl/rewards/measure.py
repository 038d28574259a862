"""Evaluation of a learned reward on episodes and policies that it has not seen, and its page."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib import figure as mpl
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import inline
from vla_rl.evaluation.signal import Calibration, auc_figure, calibration, calibration_interval, outcome_figures
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


BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe & Ito's: told apart by color-blind readers too.
NUM_SHOWN, NUM_IMAGES = 4, 8


@dataclass(frozen=True)
class Strip:
    """An episode as it was judged: its frames above the curves, as SVG, and a line about it."""

    picture: Markup
    text: str


def write_page(result: RewardResult, model: LearnedReward, frames: RewardFrames, judged: Judged, path: Path) -> Path:
    """Write the page; its pictures are inside it, nothing is fetched."""
    real, probability = frames.success, judged.probability
    failed, succeeded = np.flatnonzero(~real), np.flatnonzero(real)
    content = {
        "summary": result.summary(),
        "bound": f"{100 * result.max_false_success:g} %",
        "titles": [title for title, _ in FIGURES.values()],
        "meanings": list(FIGURES.values()),
        "rows": result.rows(),
        "weights": result.weights[:12],
        "calibration": inline(draw_calibration(result), "Share of successes over probability"),
        "parts": [
            (
                "Worst false successes",
                "Failed episodes with the highest probability of success. Look at what they have in common: RL will.",
                [_strip(e, model, frames, judged) for e in failed[np.argsort(-probability[failed])][:NUM_SHOWN]],
            ),
            (
                "Worst misses",
                "Successful episodes with the lowest.",
                [_strip(e, model, frames, judged) for e in succeeded[np.argsort(probability[succeeded])][:NUM_SHOWN]],
            ),
        ],
    }
    write_text_atomic(path, page_template(__package__ or "", "reward_page.html").render(content))
    return path


def draw_calibration(result: RewardResult) -> mpl.Figure:
    """Share of successes over probability, with the diagonal."""
    figure = mpl.Figure(figsize=(4.2, 3.6), dpi=110, layout="constrained")
    axes, bins = figure.subplots(), result.curve.bins
    x, y = [b.probability for b in bins], [b.success for b in bins]
    axes.plot([0, 1], [0, 1], color="#999999", linestyle="--", linewidth=0.9)
    spans = [[max(b.success - b.low, 0) for b in bins], [max(b.high - b.success, 0) for b in bins]]
    axes.errorbar(x, y, yerr=spans, color=BLUE, marker="o", linewidth=1.2, capsize=2)
    axes.set_xlabel("probability of success")
    axes.set_ylabel("share that succeeded")
    return figure


def draw_episode(number: int, model: LearnedReward, frames: RewardFrames, judged: Judged) -> mpl.Figure:
    """Frames of an episode in a row, above probability and progress over its control steps."""
    rows = np.flatnonzero(frames.owner == number)
    shown = np.unique(np.linspace(0, len(rows) - 1, NUM_IMAGES).round().astype(int))
    images = frames.observation(rows[shown]).images[model.facts.cameras[0]]
    steps = frames.step[rows]
    figure = mpl.Figure(figsize=(1.15 * NUM_IMAGES, 3.1), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, NUM_IMAGES, height_ratios=(1.1, 1.3))
    for column, (image, row) in enumerate(zip(images, shown, strict=True)):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(image)
        axes.set_axis_off()
        axes.set_title(f"step {steps[row]}", fontsize=7)
    axes = figure.add_subplot(grid[1, :])
    axes.plot(steps, judged.said.success[rows], color=ORANGE, marker="o", markersize=3, label="probability of success")
    axes.plot(steps, judged.said.progress[rows], color=BLUE, linestyle="--", marker="s", markersize=3, label="progress")
    if frames.success[number]:
        axes.axvline(frames.steps_to_success[number], color="black", linewidth=0.8, label="success")
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("control step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False, loc="upper left")
    return figure


def _strip(number: int, model: LearnedReward, frames: RewardFrames, judged: Judged) -> Strip:
    outcome = "succeeded" if frames.success[number] else "failed"
    verdict = "counts as a success" if judged.counts[number] else "does not count as a success"
    text = (
        f"{frames.starts[number]}: “{frames.instructions[number]}”; {outcome}, {verdict} "
        f"(probability {judged.probability[number]:.2f})"
    )
    return Strip(inline(draw_episode(number, model, frames, judged), text), text)
