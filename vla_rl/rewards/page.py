"""The page of `vla-rl reward eval`: the figures, the curve of calibration, and the worst errors frame by frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib import figure as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vla_rl.common.atomic import write_text_atomic
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import inline
from vla_rl.rewards.frames import RewardFrames
from vla_rl.rewards.measure import FIGURES, Judged, RewardResult
from vla_rl.rewards.model import LearnedReward

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


def draw_calibration(result: RewardResult) -> Figure:
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


def draw_episode(number: int, model: LearnedReward, frames: RewardFrames, judged: Judged) -> Figure:
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
