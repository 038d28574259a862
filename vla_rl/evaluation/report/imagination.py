"""Report section on RL in a world model: trust, and the gate's findings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.gate import GateCheck
from vla_rl.evaluation.video import embedded
from vla_rl.interfaces import Admission, TrustClip, Verdict

_COUNTED = {"rollouts": "to fit on", "held_out": "held out", "gate": "gate", "validation": "validation"}
_TRUSTED = {"informedness": "successes told from failures", "false_success": "false successes"}
NEWEST = {"calibration_error": "calibration error", **_TRUSTED}
MAX_CLIPS, MAX_CLIP_BYTES = 8, 4 * 2**20


class TrustClips(BaseModel):
    """The clips that a trust.json names; whatever else it holds is the world model's own and passed over."""

    clips: tuple[TrustClip, ...] = ()


def imagination(folder: Path) -> dict[str, Any] | None:
    """What the template shows; None where the run was not in a world model.

    Args:
        folder: the run's, with the files that `vla_rl.training.run` writes.
    """
    file = RunFolder(folder).admission
    if not file.is_file():
        return None
    admission = Admission.model_validate_json(file.read_bytes())
    return {
        "problem": admission.problem,
        "verdicts": [verdict.model_dump() | {"state": _state(verdict)} for verdict in admission.verdicts],
        "page": str(admission.page),
        "checks": [check.text() for check in _checks(folder)],
        "power": _gate(folder).get("power", ""),
        "clips": _clips(Path(admission.report)),
    }


def rounds(folder: Path) -> dict[str, Any] | None:
    """The table of an outer loop's rounds; None where the folder is not one's."""
    file = RunFolder(folder).rounds
    if not file.is_file():
        return None
    table = json.loads(file.read_text(encoding="utf-8"))
    rows = table["rows"]
    total = rows[-1]["total"]
    budget = f" of at most {table['budget']}" if table["budget"] else ""
    online = f" RL in the simulator learned from {table['online']}." if table["online"] is not None else ""
    return {
        "lead": f"{total} real episodes{budget}, each counted once; the evaluation's are not learned from.{online}",
        "modes": list(rows[-1]["real"]),
        "rows": [_round(row) for row in rows],
    }


def _round(row: dict[str, Any]) -> dict[str, Any]:
    counts = row["episodes"]
    parts = [f"{counts[name]} {word}" for name, word in _COUNTED.items() if counts[name]]
    keyframes = ", ".join(f"{count} {kind}" for kind, count in row["num_keyframes"].items())
    return {
        "number": row["number"],
        "episodes": f"{sum(counts.values())}: {', '.join(parts)}",
        "total": row["total"],
        "keyframes": keyframes or "–",
        "trust": [
            f"{title} {figure_text(row['before'].get(name))} → {figure_text(row['after'].get(name))}"
            if row["before"]
            else f"{title} {figure_text(row['after'].get(name))}"
            for name, title in _TRUSTED.items()
        ],
        "newest": _newest(row.get("newest")),
        "imagined": _imagined(row),
        "gate": row.get("verdict") or "–",
        "real": [f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]" for rate, low, high in row["real"].values()],
    }


def _newest(figures: dict[str, list[float | None]] | None) -> list[str]:
    """Lines on trust after RL."""
    if not figures:
        return ["–"]
    auc = f"AUC {figure_text(figures.get('auc'), '{:.2f}')}"
    return [auc, *(f"{title} {figure_text(figures.get(name))}" for name, title in NEWEST.items())]


def _imagined(row: dict[str, Any]) -> str:
    if row["refused"]:
        return f"no RL: {row['refused']}"
    if row["imagined"] is None:
        return "–"
    probability = row.get("imagined_probability")
    more = "" if probability is None else f"; {100 * probability:.1f} % by its probability"
    return f"{100 * row['imagined']:.1f} %{more}"


def figure_text(figure: list[float | None] | None, form: str = "") -> str:
    """A fraction with its interval, as `form` writes it; by default in per cent."""
    value, low, high = figure or (None, None, None)
    if value is None:
        return "not measured"
    shown = [form.format(one) if form else f"{100 * one:.0f}" for one in (value, low, high) if one is not None]
    interval = f" [{shown[1]}, {shown[2]}]" if len(shown) == 3 else ""
    return shown[0] + ("" if form else " %") + interval


def _state(verdict: Verdict) -> str:
    """In a word: whether a requirement holds."""
    if verdict.passed:
        return "holds"
    return "open" if math.isnan(verdict.value) else "fails"


def _gate(folder: Path) -> dict[str, Any]:
    file = RunFolder(folder).gate
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _checks(folder: Path) -> list[GateCheck]:
    return [GateCheck.model_validate(check) for check in _gate(folder).get("checks", [])]


def _clips(report: Path) -> list[dict[str, Any]]:
    """Imagined-beside-real clips of the trust report: one of each outcome, then more."""
    if not report.is_file():
        return []
    seen: dict[tuple[bool, bool], int] = {}
    ranked = []
    for clip in TrustClips.model_validate_json(report.read_bytes()).clips:
        outcome = (clip.real, clip.imagined)
        seen[outcome] = seen.get(outcome, 0) + 1
        ranked.append((seen[outcome], clip))
    shown = []
    for _, clip in sorted(ranked, key=lambda pair: pair[0]):
        file = report.parent / clip.file
        if len(shown) < MAX_CLIPS and file.is_file() and file.stat().st_size <= MAX_CLIP_BYTES:
            shown.append(clip.model_dump() | {"data": embedded(file)})
    return shown
