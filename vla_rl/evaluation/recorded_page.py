"""The page about action errors: the table, the error by step of the chunk, actions predicted against recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import figure as mpl
from matplotlib.figure import Figure

from vla_rl.common.atomic import write_text_atomic
from vla_rl.evaluation.recorded import MAX_MOMENTS, NOT_SUCCESS, ActionErrors, Track
from vla_rl.evaluation.report.charts import BLUE, GRAY, ORANGE, page_template, png

COLUMNS = 3  # of plots, a dimension each


def write_page(result: ActionErrors, tracks: Sequence[Track], path: Path, command: str = "") -> Path:
    """Write the page; its pictures are inside it, nothing is fetched."""
    ordered = sorted(tracks, key=lambda track: track.error)
    shown = {"the episode with the largest error": ordered[-1]}
    if len(ordered) > 1:
        shown = {"the usual episode": ordered[(len(ordered) - 1) // 2], **shown}
    names = [one.name for one in result.dimensions]
    content = {
        "result": result,
        "not_success": NOT_SUCCESS,
        "unseen": result.unseen or "Whether the policy has learned from these episodes is not known here.",
        "most": MAX_MOMENTS,
        "by_step": png(draw_steps(result)),
        "tracks": [
            (f"{what.capitalize()}: {t.name}, “{t.instruction}”, error {100 * t.error:.1f} % of the range",
             png(draw_track(t, names)))
            for what, t in shown.items()
        ],
        "command": command,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, page_template(__package__ or "", "recorded_page.html").render(content))
    return path


def draw_steps(result: ActionErrors) -> Figure:
    """Error over the steps of the chunk, policy and baseline, with intervals."""
    figure = mpl.Figure(figsize=(6.4, 3.4), dpi=110, layout="constrained")
    axes, steps = figure.subplots(), np.arange(1, len(result.steps) + 1)
    for bands, color, marker, name in (
        ([one.error for one in result.steps], BLUE, "o", result.name),
        ([one.repeated for one in result.steps], ORANGE, "s", "repeating the last action"),
    ):
        value, low, high = (100 * np.array([getattr(band, end) for band in bands]) for end in ("value", "low", "high"))
        axes.plot(steps, value, color=color, marker=marker, markersize=4, label=name)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"step of the chunk ({1000 / result.control_hz:.0f} ms each)")
    axes.set_ylabel("action error, % of the range")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_track(track: Track, names: Sequence[str]) -> Figure:
    """Each dimension over an episode: as recorded, and as chunks one after the other."""
    rows = math.ceil(len(names) / COLUMNS)
    figure = mpl.Figure(figsize=(9.6, 1.75 * rows), dpi=110, layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).reshape(-1)
    for number, axes in enumerate(grid):
        if number >= len(names):
            axes.set_axis_off()
            continue
        axes.plot(track.actions[:, number], color=GRAY, linewidth=2.5, label="recorded")
        end = 0
        for moment, chunk in zip(track.moments, track.predicted[:, :, number], strict=True):
            if moment >= end:
                end = moment + len(chunk)
                steps = np.arange(moment, min(end, len(track.actions)))
                axes.plot(steps, chunk[: len(steps)], color=BLUE, linewidth=1.3)
                axes.plot(moment, chunk[0], color=BLUE, marker="o", markersize=3)
        axes.set_title(names[number], fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("control step", fontsize=8)
    return figure
