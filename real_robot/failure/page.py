"""The page of `vla-rl failure eval`: the table's columns, and every detector's scores over time against its band."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.common.atomic import write_text_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from real_robot.failure.measure import Curves, FailureReport, Figure

SUCCESS, FAILURE, LEVEL = "#0072B2", "#D55E00", "#111111"  # Okabe & Ito's: told apart by color-blind readers too.
_SHOWN = 40  # Curves of each outcome drawn singly in a panel.

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1b2733}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:.35em .7em;border-bottom:1px solid #dde3e8;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}img{max-width:100%}.scroll{overflow-x:auto}small{color:#5b6b78}"""


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


def text(figure: Figure | None) -> str:
    """ "0.93 [0.91, 0.95]", or a dash where there is none."""
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def write_page(report: FailureReport, path: Path) -> Path:
    """Write the page; its picture is inside it, nothing is fetched."""
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in COLUMNS)
    rows = "".join(
        f"<tr><td>{escape(kind)}</td>" + "".join(f"<td>{text(own.get(name))}</td>" for _, name in COLUMNS) + "</tr>"
        for kind, own in report.figures.items()
    )
    policy = report.facts["policy_hash"][:12]
    picture = base64.b64encode(_picture(report)).decode()
    alpha = ", ".join(f"{kind} {value:g}" for kind, value in report.facts["alpha"].items())
    write_text_atomic(
        path,
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Failure detection</title><style>{_STYLE}</style>
<h1>Failure detection</h1><p>{escape(report.summary())}. Policy {escape(policy)}.</p>
<div class="scroll"><table><tr><th>detector</th>{head}</tr>{rows}</table></div>
<p><small>(h): by the common horizon, the chunks that every episode of a task lived, so that its length says
nothing about how it ended. The other columns: by each episode's own end. Coverage: successes without a false alarm;
promised at least 1 - alpha (alpha: {escape(alpha)}). Detection time: share of a failed episode gone at the first
alarm, 1 for a miss. The clock is a score that is the time alone. Intervals:
{escape(report.facts["intervals"])}.</small></p>
<h2>Scores over time</h2><p>How many modulations a score stands above its band's center, by chunk. Dashed: the level
of an alarm. Shaded: the middle 80 % of the episodes still running; thin: single episodes.</p>
<img alt="Scores over time, successes and failures, by detector and task"
src="data:image/png;base64,{picture}"></html>
""",
    )
    return path


def _picture(report: FailureReport) -> bytes:
    """A PNG: one row a detector, one column a task."""
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
    handles = [axes[0, 0].plot([], [], color=color)[0] for color in (SUCCESS, FAILURE)]
    figure.legend(handles, ["success", "failure"], loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


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
        panel.plot(at, middle, color=color, linewidth=1.6)
    panel.axhline(curves.q, color=LEVEL, linestyle="--", linewidth=0.9)
