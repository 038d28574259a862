"""The trust page's charts: curves by frame, calibration, policies; each an SVG inside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.figure
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from vla_rl.evaluation.outcomes import Calibration
from vla_rl.evaluation.report.charts import inline
from world_model.trust.measures.metrics import Curve
from world_model.trust.measures.outcomes import PolicyRates

# Okabe & Ito's colors, told apart by color-blind readers too.
BLUE, ORANGE, GREEN, GRAY, VERMILION = "#0072B2", "#E69F00", "#009E73", "#8796A5", "#D55E00"
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": "black",
    "legend.frameon": False,
}


class Line(NamedTuple):
    """A curve by frame, with its 95 % band."""

    name: str
    curve: Curve
    color: str


def curves_chart(title: str, lines: Sequence[Line], horizon: float | None, percent: bool = False) -> Markup:
    """Curves over control steps; a dashed line at the trust horizon, in control steps, where it was measured."""

    def draw(axes: Any) -> None:
        for line in lines:
            scale = 100 if percent else 1
            mean, low, high = ([scale * y for y in part] for part in (line.curve.mean, line.curve.low, line.curve.high))
            axes.plot(line.curve.steps, mean, color=line.color, label=line.name, marker="o", markersize=3)
            axes.fill_between(line.curve.steps, low, high, color=line.color, alpha=0.15, linewidth=0)
        if horizon is not None:
            axes.axvline(horizon, color=VERMILION, linestyle="--", linewidth=1, label="trust horizon")
        axes.set_xlim(left=0)
        axes.set_xlabel("control steps imagined")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if percent:
            axes.set_ylim(-2, 102)
            axes.set_ylabel("%")
        axes.legend(fontsize=8)

    return _picture(title, draw)


def calibration_chart(calibrations: Mapping[str, Calibration]) -> Markup:
    """Success rate against predicted probability; on the diagonal, what is predicted happens as often as that."""
    names = {"imagined": ("imagined frames", BLUE), "real": ("real frames", ORANGE)}

    def draw(axes: Any) -> None:
        axes.plot([0, 100], [0, 100], color=GRAY, linestyle="--", linewidth=1, label="perfect")
        for key, (name, color) in names.items():
            if key in calibrations:
                bins = calibrations[key].bins
                x, y = ([100 * getattr(b, part) for b in bins] for part in ("probability", "success"))
                below = [100 * (b.success - b.low) for b in bins]
                above = [100 * (b.high - b.success) for b in bins]
                axes.errorbar(x, y, [below, above], color=color, marker="o", markersize=4, label=name, capsize=2)
        _percent_axes(axes, "an episode's highest predicted probability, %", "really succeeded, %")

    return _picture("Calibration", draw)


def policies_chart(policies: Sequence[PolicyRates]) -> Markup:
    """Imagined against real success of each policy."""

    def draw(axes: Any) -> None:
        axes.plot([0, 100], [0, 100], color=GRAY, linestyle="--", linewidth=1, label="imagined = real")
        for policy in policies:
            x, y = 100 * policy.real.value, 100 * policy.imagined.value
            axes.plot([100 * policy.real.low, 100 * policy.real.high], [y, y], color=BLUE, linewidth=1, alpha=0.5)
            axes.plot(
                [x, x], [100 * policy.imagined.low, 100 * policy.imagined.high], color=BLUE, linewidth=1, alpha=0.5
            )
            axes.plot(x, y, color=BLUE, marker="o", markersize=5)
            axes.annotate(policy.name, (x, y), xytext=(5, -10), textcoords="offset points", fontsize=8)
        _percent_axes(axes, "real success, %", "imagined success, %")

    return _picture("Policies", draw)


def _percent_axes(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlim(-2, 102)
    axes.set_ylim(-2, 102)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(fontsize=8, loc="upper left")


def _picture(title: str, draw: Any) -> Markup:
    with matplotlib.rc_context(_STYLE):
        figure = matplotlib.figure.Figure(figsize=(3.8, 2.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        draw(axes)
        return inline(figure, title)
