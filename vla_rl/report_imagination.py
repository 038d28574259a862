"""The part of report.html on a run inside a world model: was it trusted, and what did the gate find."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vla_rl.gate import GATE_FILE, GateCheck

ADMISSION_FILE = "admission.json"
MAX_CLIPS, MAX_CLIP_BYTES = 8, 4 * 2**20


def imagination(folder: Path) -> dict[str, Any] | None:
    """What the template shows; None where the run was not in a world model.

    Args:
        folder: the run's, with the files that `vla_rl.training` writes.
    """
    file = folder / ADMISSION_FILE
    if not file.is_file():
        return None
    admission = json.loads(file.read_text(encoding="utf-8"))
    trust_folder = Path(admission["report"]).parent
    return {
        "problem": admission["problem"],
        "verdicts": [verdict | {"state": _state(verdict)} for verdict in admission["verdicts"]],
        "page": str(trust_folder / "trust.html"),
        "checks": [check.text() for check in _checks(folder)],
        "clips": _clips(trust_folder),
    }


def _state(verdict: dict[str, Any]) -> str:
    """In a word: whether a requirement holds."""
    if verdict["passed"]:
        return "holds"
    return "fails" if verdict["value"] is not None else "open"


def _checks(folder: Path) -> list[GateCheck]:
    file = folder / GATE_FILE
    if not file.is_file():
        return []
    return [GateCheck.model_validate(check) for check in json.loads(file.read_text(encoding="utf-8"))["checks"]]


def _clips(trust_folder: Path) -> list[dict[str, Any]]:
    """Imagined-beside-real clips of the trust report: one of each outcome, then more."""
    report = trust_folder / "trust.json"
    if not report.is_file():
        return []
    seen: dict[tuple[bool, bool], int] = {}
    ranked = []
    for clip in json.loads(report.read_text(encoding="utf-8"))["clips"]:
        outcome = (clip["real"], clip["imagined"])
        seen[outcome] = seen.get(outcome, 0) + 1
        ranked.append((seen[outcome], clip))
    shown = []
    for _, clip in sorted(ranked, key=lambda pair: pair[0]):
        file = trust_folder / clip["file"]
        if len(shown) < MAX_CLIPS and file.is_file() and file.stat().st_size <= MAX_CLIP_BYTES:
            data = base64.b64encode(file.read_bytes()).decode()
            shown.append(clip | {"data": Markup("data:video/mp4;base64," + data)})
    return shown
