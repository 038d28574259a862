"""Small charts for pages: lines and bars with intervals as inline SVG, one stacked bar, figures."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import matplotlib
from markupsafe import Markup

from vla_rl.evaluation.results import shorten
from vla_rl.evaluation.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's colors, told apart by color-blind readers too.
BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GRAY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#A9B4C0",
)
STAGE_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, "#F0E442", "#7F8C99")


@dataclass(frozen=True)
class Line:
    """A named curve: (x, y) points in order; a NaN y leaves a gap. `marked` draws the points, for sparse ones."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """A success rate, 0 .. 1, with its interval and a note such as "n = 400"."""

    rate: float
    interval: Interval
    note: str
    color: str


def line_chart(title: str, lines: Sequence[Line], percent: bool = False, width: int = 400, height: int = 220) -> str:
    """Curves over iterations, with a legend above. `percent`: y is a fraction, shown as 0 to 100 %."""
    left, right, bottom = 52, 14, 30
    legend, top = _legend(lines, left, width)
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    x_high = x_high if x_high > x_low else x_low + 1
    y_ticks = [0, 0.25, 0.5, 0.75, 1.0] if percent else nice_ticks(min(y for _, y in finite), max(y for _, y in finite))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def x_at(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (width - left - right)

    def y_at(y: float) -> float:
        return top + (y_high - y) / (y_high - y_low) * (height - top - bottom)

    parts = [_text(0, 14, title, "title")]
    for tick in y_ticks:
        label = f"{100 * tick:.0f} %" if percent else f"{tick:g}"
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}"/>')
        parts.append(_text(left - 7, y + 4, label, "tick", "end"))
    ticks = sorted({round(t) for t in nice_ticks(x_low, x_high, 6) if x_low <= t <= x_high})
    parts += [_text(x_at(t), height - bottom + 16, str(t), "tick", "middle") for t in ticks]
    parts += legend
    for line in lines:
        for piece in _pieces(line.points):
            path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in piece)
            parts.append(f'<polyline fill="none" stroke="{line.color}" stroke-width="2" points="{path}"/>')
            if line.marked or len(piece) == 1:
                parts += [
                    f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3.2" fill="{line.color}"/>' for x, y in piece
                ]
    return _svg(width, height, f"{title} by iteration", parts)


def _legend(lines: Sequence[Line], left: float, width: float) -> tuple[list[str], float]:
    """The lines' names under the title, in as many rows as they need, and where the curves begin; none for one line."""
    parts, x, y = [], left, 30.0
    for line in lines if len(lines) > 1 else ():
        advance = 34 + 6.6 * len(line.name)
        if x > left and x + advance - 12 > width:
            x, y = left, y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 6:.1f}" width="14" height="4" rx="2" fill="{line.color}"/>')
        parts.append(_text(x + 19, y, line.name, "legend"))
        x += advance
    return parts, y + 14


def bar_chart(
    title: str, rows: Sequence[tuple[str, Sequence[Bar]]], labels: Mapping[str, str] | None = None, width: int = 400
) -> str:
    """Horizontal bars with intervals: rows of (name, bars), the bars of a row in the same order throughout.

    Names stand above their bars, so that these have room where the page is as narrow as a phone.

    Args:
        labels: name -> what is written in its place; the name is shown on hover.
    """
    left, right, top, thickness, gap, label_height = 12, 92, 30, 18, 10, 18
    written = {name: shorten((labels or {}).get(name, name), 56) for name, _ in rows}
    scale = width - left - right
    parts, y = [_text(0, 14, title, "title")], float(top)
    body = []
    for label, bars in rows:
        strong = "label strong" if label == "all tasks" else "label"
        body.append(_text(left, y + label_height - 5, written[label], strong, full=label))
        y += label_height
        for bar in bars:
            middle = y + thickness / 2
            low, high = (left + scale * end for end in bar.interval)
            whisker = f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8M{high:.1f} {middle - 4:.1f}v8"
            body.append(
                f'<rect x="{left}" y="{y + 1:.1f}" width="{max(scale * bar.rate, 0.5):.1f}" '
                f'height="{thickness - 2}" rx="2" fill="{bar.color}"/>'
                f'<path class="halo" d="{whisker}"/><path class="whisker" d="{whisker}"/>'
            )
            body.append(_text(high + 7, middle + 4, f"{100 * bar.rate:.0f} %  {bar.note}", "value"))
            y += thickness
        y += gap
    bottom = y - gap + 6
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        x = left + scale * tick
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        parts.append(_text(x, bottom + 15, f"{100 * tick:.0f} %", "tick", "middle"))
    return _svg(width, bottom + 22, title, parts + body)


def stacked_bar(title: str, shares: Mapping[str, float]) -> str:
    """One bar cut into shares (name -> amount), with the names and per cent below; HTML, which wraps on a phone."""
    total = sum(shares.values())
    pieces, names = [], []
    for i, (name, amount) in enumerate(shares.items()):
        color, share = STAGE_COLORS[i % len(STAGE_COLORS)], 100 * amount / total
        label = escape(f"{name} {share:.0f} %")
        pieces.append(f'<div style="width: {share:.1f}%; background: {color}" title="{label}"></div>')
        names.append(f'<span><span class="swatch" style="background: {color}"></span>{label}</span>')
    bar = f'<div class="stack" role="img" aria-label="{escape(title)}">{"".join(pieces)}</div>'
    return f'{bar}<div class="shares">{"".join(names)}</div>'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        low, high = low - max(abs(low), 1e-6) / 2, high + max(abs(high), 1e-6) / 2
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Runs of finite points."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", full: str = "") -> str:
    hover = f"<title>{escape(full)}</title>" if full and full != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{hover}{escape(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def inline(figure: Figure, label: str) -> Markup:
    """A figure as SVG inside its page, on whose ground it stands; black, as of texts and axes, becomes its ink."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(' xmlns[:a-z]*="[^"]*"', "", stream.getvalue().partition("<svg")[2]).replace("#000000", "currentColor")
    return Markup(f'<svg class="figure" role="img" aria-label="{escape(label)}"{svg}')
