"""The trust page: one self-contained HTML file with verdicts first, then figures, curves, policies and clips.

report = save_trust(measured, folder, control_hz=20, require=TrustConfig().require)   # trust.json, trust.html, clips
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from vla_rl.common.atomic import write_text_atomic
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import BLUE, GREEN, ORANGE, VERMILION, inline
from vla_rl.evaluation.signal import Calibration
from vla_rl.evaluation.statistics import Figure
from vla_rl.evaluation.video import decorate, embedded, tile, write_mp4
from vla_rl.interfaces import TrustClip
from world_model.trust.config import Requirement
from world_model.trust.figures import (
    ACTIONS,
    FIGURES,
    GROUPS,
    HORIZON,
    OUTCOMES,
    POLICIES,
    VIDEO,
    as_text,
    evidence,
    with_evidence,
)
from world_model.trust.measure import Clip, Measured
from world_model.trust.measures.metrics import Curve
from world_model.trust.measures.outcomes import PolicyRates
from world_model.trust.report import PAGE_FILE, TRUST_FILE, TrustReport

CLIPS_FOLDER = "trust_clips"
GRAY = "#8796A5"
_STYLE_FIGURES = (
    "real_success",
    "agreement",
    "informedness",
    "false_success",
    "missed_success",
    "head_agreement",
    "skill",
    "psnr",
)
_LEADS = {
    OUTCOMES: "Held-out episodes of the policy, which the world model was not fitted on, are imagined from their first "
    "frame with their logged actions. Do they end as they did in reality?",
    HORIZON: "How many control steps may be imagined before images or outcomes no longer hold.",
    ACTIONS: "A world model that plays back a likely film, whatever the robot does, can look good and teach nothing.",
    VIDEO: "How near the imagined frames are to the real ones, averaged over the whole episodes.",
    POLICIES: "Policies of differing quality act from the same initial states, in reality and in imagination. Does "
    "imagination rank them as reality does?",
}
# Curves by group: title, (name, curve, color), in per cent.
_CHARTS = {
    HORIZON: (
        (
            "Has it succeeded by now?",
            (("imagination agrees", "outcome_agreement", BLUE), ("majority guess", "outcome_majority", GRAY)),
            True,
        ),
        ("Success so far", (("real", "real_success", GREEN), ("imagined", "imagined_success", BLUE)), True),
    ),
    VIDEO: (
        (
            "Latent error",
            (
                ("imagined", "latent_error", BLUE),
                ("first frame held", "latent_error_copy", GRAY),
                ("between two futures", "latent_spread", ORANGE),
            ),
            False,
        ),
        (
            "PSNR, dB",
            (
                ("imagined", "psnr", BLUE),
                ("autoencoder alone", "psnr_reconstruction", GREEN),
                ("first frame held", "psnr_copy", GRAY),
            ),
            False,
        ),
        ("SSIM", (("imagined", "ssim", BLUE),), False),
        ("LPIPS", (("imagined", "lpips", BLUE),), False),
        ("State error", (("imagined", "state_error", ORANGE),), False),
    ),
}


def save_trust(measured: Measured, folder: Path, control_hz: float, require: Mapping[str, Requirement]) -> TrustReport:
    """Write trust.json, the clips and the page into a folder, and return the report that was written.

    Args:
        control_hz: control steps per second, for the clips' speed.
        require: what the page's verdicts are about.
    """
    folder = Path(folder)
    rate = control_hz / measured.report.frame_steps
    clips = tuple(_write_clip(folder, i, clip, rate) for i, clip in enumerate(measured.clips))
    report = measured.report.model_copy(update={"clips": clips})
    report.save(folder / TRUST_FILE)
    write_page(report, folder, require)
    return report


def write_page(report: TrustReport, folder: Path, require: Mapping[str, Requirement]) -> Path:
    """Write `trust.html` about a report whose clips lie in `folder`; clips that are gone are left out."""
    template = page_template(__package__ or "", "trust_page.html")
    path = Path(folder) / PAGE_FILE
    write_text_atomic(path, template.render(_page(report, Path(folder), require)))
    return path


def _write_clip(folder: Path, number: int, clip: Clip, rate: float) -> TrustClip:
    """Real left, imagined right, one row for each view."""
    really = clip.kind in ("success", "missed success")
    believed = clip.kind in ("success", "false success")
    tiles = []
    for view in range(clip.real.shape[1]):
        for name, frames, success in (("real", clip.real, really), ("imagined", clip.imagined, believed)):
            caption = f"{name}: {'success' if success else 'failure'}"
            tiles.append(decorate(frames[:, view], caption, success, min_size=192, hold=2))
    name = f"{CLIPS_FOLDER}/{number:02d}_{re.sub(r'[^A-Za-z0-9]+', '-', f'{clip.kind} {clip.start}')}.mp4"
    write_mp4(folder / name, tile(tiles, columns=2), rate)
    return TrustClip(file=name, start=clip.start, instruction=clip.instruction, real=really, imagined=believed)


def _page(report: TrustReport, folder: Path, require: Mapping[str, Requirement]) -> dict[str, Any]:
    verdicts = report.check(require)
    refusing, warning = ([v for v in verdicts if not v.passed and v.refuses is r] for r in (True, False))
    provenance = report.provenance
    kicker = ["vla-rl trust report", report.created[:10], f"key {provenance.model_key}" if provenance.model_key else ""]
    return {
        "kicker": " · ".join(part for part in kicker if part),
        "model": Path(provenance.model).name or "world model",
        "run": _run_page(folder.resolve()),
        "refused": bool(refusing),
        "headline": _headline(len(refusing), len(warning)),
        "verdicts": [(v, FIGURES[v.figure.split("/")[-1]].meaning) for v in verdicts],
        "clips": _clips(report, folder),
        "groups": [_group(report, name) for name in GROUPS if any(FIGURES[f].group == name for f in report.figures)],
        "policies": [
            (p.name, [with_evidence(f, u) for f, u in _policy_cells(p.real, p.imagined, p.gap, p.agreement)])
            for p in report.policies
        ],
        "policies_group": POLICIES,
        "styles": _styles(report),
        "not_measured": [(FIGURES[name].title, why) for name, why in report.not_measured.items()],
        "provenance": [
            (name, ", ".join(value) if isinstance(value, tuple) else str(value))
            for name, value in provenance.model_dump().items()
            if value
        ],
        "config": report.config.model_dump_json(indent=1),
    }


def _run_page(folder: Path) -> str:
    """Where, from its folder, the page of the RL lies that a closed loop runs in a world model; "" of other folders."""
    is_of_round = folder.name == "world_model" and folder.parent.parent.name.startswith("round_")
    return "../../train/report.html" if is_of_round else ""


def _headline(num_refusing: int, num_warning: int) -> str:
    warnings = "" if num_warning == 0 else f" {num_warning} warning{'s' if num_warning > 1 else ''}, see below."
    if num_refusing == 0:
        return f"RL in this world model may start.{warnings}"
    figures = "one figure does" if num_refusing == 1 else f"{num_refusing} figures do"
    return f"RL in this world model refuses to start: {figures} not reach what is required.{warnings}"


def _policy_cells(real: Figure, imagined: Figure, gap: Figure, agreement: Figure) -> list[tuple[Figure, Any]]:
    return [(real, "rate"), (imagined, "rate"), (gap, "points"), (agreement, "rate")]


def _group(report: TrustReport, name: str) -> dict[str, Any]:
    """One part of the page: its figures, in the order of `figures.FIGURES`, and its charts."""
    rows = [
        {
            "title": info.title,
            "value": as_text(report.figures[figure].value, info.unit),
            "evidence": evidence(report.figures[figure], info.unit),
            "meaning": info.meaning,
        }
        for figure, info in FIGURES.items()
        if info.group == name and figure in report.figures
    ]
    charts = [_curves(report, *chart) for chart in _CHARTS.get(name, ())]
    if name == OUTCOMES and report.calibrations:
        charts.append(calibration_chart(report.calibrations))
    if name == POLICIES and report.policies:
        charts.append(policies_chart(report.policies))
    return {"name": name, "lead": _LEADS[name], "rows": rows, "charts": [chart for chart in charts if chart]}


def _curves(report: TrustReport, title: str, lines: Sequence[tuple[str, str, str]], percent: bool) -> Markup | None:
    """The chart of the curves that were measured; None where none was."""
    found = [Line(name, report.curves[key], color) for name, key, color in lines if key in report.curves]
    horizon = report.figure("trust_horizon")
    if not found:
        return None
    return curves_chart(title, found, None if horizon is None else horizon.value, percent)


def _styles(report: TrustReport) -> dict[str, Any] | None:
    if not report.styles:
        return None
    columns = {"as in training": report.figures} | report.styles
    rows = []
    for name in _STYLE_FIGURES:
        info = FIGURES[name]
        cells = [with_evidence(figures[name], info.unit) if name in figures else "–" for figures in columns.values()]
        rows.append((info.title, cells))
    return {"columns": list(columns), "rows": rows}


def _clips(report: TrustReport, folder: Path) -> list[dict[str, Any]]:
    kinds = {(True, False): "Missed successes", (False, True): "False successes", (True, True): "Successes"}
    found: dict[str, list[dict[str, str]]] = {}
    for clip in report.clips:
        path = folder / clip.file
        if path.is_file():
            kind = kinds.get((clip.real, clip.imagined), "Failures")
            found.setdefault(kind, []).append(
                {"data": embedded(path), "start": clip.start, "instruction": clip.instruction}
            )
    return [{"kind": kind, "clips": clips} for kind, clips in found.items()]


# --- charts: each an SVG inside the page --------------------------------------------------------

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
