"""The page of `vla-rl failure eval`: the table's columns, and every detector's scores over time against its band."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.common.atomic import write_text_atomic
from vla_rl.report.page import page_template

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from real_robot.failure.measure import Curves, FailureReport
    from real_robot.failure.measure import Figure as Measured

SUCCESS, FAILURE, LEVEL = "#0072B2", "#D55E00", "#111111"  # Okabe & Ito's: told apart by color-blind readers too,
DASHES = {SUCCESS: "-", FAILURE: "-."}  # and in print by their dashes.
_SHOWN = 40  # Curves of each outcome drawn singly in a panel.

# Column's title -> figure. "h": at the common horizon; otherwise by each episode's own end.
COLUMNS = (
    ("ROC-AUC (h)", "roc_auc"),
    ("TPR (h)", "tpr_common"),
    ("TNR (h)", "tnr_common"),
    ("balanced acc. (h)", "balanced_accuracy_common"),
    ("TPR", "tpr"),
    ("TNR = coverage", "tnr"),
    ("balanced acc.", "balanced_accuracy"),
    ("detection time", "detection_time"),
    ("ROC-AUC by the end", "roc_auc_by_end"),
)


def text(figure: Measured | None) -> str:
    """ "0.93 [0.91, 0.95]", or a dash where there is none."""
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def write_page(report: FailureReport, path: Path) -> Path:
    """Write the page; its picture is inside it, nothing is fetched."""
    content = {
        "summary": report.summary(),
        "policy": report.facts["policy_hash"][:12],
        "titles": [title for title, _ in COLUMNS],
        "rows": [(kind, [text(own.get(name)) for _, name in COLUMNS]) for kind, own in report.figures.items()],
        "alpha": ", ".join(f"{kind} {value:g}" for kind, value in report.facts["alpha"].items()),
        "intervals": report.facts["intervals"],
        "picture": base64.b64encode(_picture(report)).decode(),
    }
    write_text_atomic(path, page_template(__package__ or "", "failure_page.html").render(content))
    return path


def _picture(report: FailureReport) -> bytes:
    """A PNG of the chart."""
    buffer = io.BytesIO()
    draw_scores(report).savefig(buffer, format="png")
    return buffer.getvalue()


def draw_scores(report: FailureReport) -> Figure:
    """The chart: one row a detector, one column a task."""
    from matplotlib import figure as mpl
    from matplotlib.ticker import MaxNLocator

    tasks = list(dict.fromkeys(report.episodes.tasks))
    figure = mpl.Figure(figsize=(2.6 * len(tasks) + 0.6, 2.1 * len(report.curves) + 0.5), dpi=110, layout="constrained")
    axes = figure.subplots(len(report.curves), len(tasks), squeeze=False)
    for row, (kind, curves) in zip(axes, report.curves.items(), strict=True):
        for panel, task in zip(row, tasks, strict=True):
            _draw(panel, curves, report, task)
            panel.tick_params(labelsize=7)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_ylabel(kind, fontsize=9)
    for panel, task in zip(axes[0], tasks, strict=True):
        panel.set_title(task, fontsize=9)
    figure.supxlabel("chunk of the episode", fontsize=9)
    figure.supylabel("score (modulations)", fontsize=9)
    handles = [axes[0, 0].plot([], [], color=color, linestyle=DASHES[color])[0] for color in (SUCCESS, FAILURE)]
    handles.append(axes[0, 0].plot([], [], color=LEVEL, linestyle="--", linewidth=0.9)[0])
    names = ["success", "failure", "alarm above"]
    figure.legend(handles, names, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(panel: Axes, curves: Curves, report: FailureReport, task: str) -> None:
    inside = np.asarray(report.episodes.tasks) == task
    ceiling = 4 * max(abs(curves.q), 1.0)
    for color, of in ((SUCCESS, report.episodes.success), (FAILURE, ~report.episodes.success)):
        own = [curves.standings[i] for i in np.flatnonzero(inside & of)]
        if not own:
            continue
        for curve in own[:_SHOWN]:
            panel.plot(np.minimum(curve, ceiling), color=color, alpha=0.12, linewidth=0.7)
        table = np.full((len(own), max(map(len, own))), np.nan)
        for line, curve in zip(table, own, strict=True):
            line[: len(curve)] = np.minimum(curve, ceiling)
        low, middle, high = np.nanquantile(table, [0.1, 0.5, 0.9], axis=0)
        at = np.arange(len(middle))
        panel.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        panel.plot(at, middle, color=color, linestyle=DASHES[color], linewidth=1.6)
    panel.axhline(curves.q, color=LEVEL, linestyle="--", linewidth=0.9)
