"""Warnings of a report: trust that RL broke, tasks that fell, another protocol than the official one.

Also what perturbations cost, and where the run's other pages and parts lie.
"""

from __future__ import annotations

import json
import re
from os.path import relpath
from pathlib import Path
from typing import Any

from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.compare import Comparison, format_p
from vla_rl.evaluation.report.imagination import NEWEST, figure_text
from vla_rl.evaluation.results import Evaluation, EvaluationError
from vla_rl.evaluation.robustness import Robustness
from vla_rl.evaluation.verdict import changed_tasks
from vla_rl.evaluation.video import embedded
from vla_rl.interfaces import Admission

MAX_GAP = 0.1  # Imagined less real success, unless the run's own requirement says otherwise.


def broken_trust(folder: Path, after: Evaluation | None) -> list[str]:
    """Bounds of the world model's trust that surely do not hold after RL: a figure's whole interval lies beyond."""
    run = RunFolder(folder)
    if not run.admission.is_file():
        return []
    admission = Admission.model_validate_json(run.admission.read_bytes())
    bounds = {verdict.figure: verdict.bound for verdict in admission.verdicts}
    last = _json(run.rounds).get("rows", [{}])[-1]
    said = []
    for name, figure in (last.get("newest") or {}).items():
        value, low, high = figure
        beyond = re.match(r"(at most|above) (-?[\d.]+)", bounds.get(name, ""))
        if value is None or beyond is None:
            continue
        bound = float(beyond[2])
        worst = value if low is None or high is None else low if beyond[1] == "at most" else high
        if worst > bound if beyond[1] == "at most" else worst <= bound:
            percent = name in NEWEST
            limit = f"{100 * bound:g} %" if percent else f"{bound:g}"
            title = NEWEST.get(name, name.replace("_", " "))
            said.append(
                f"{title} {figure_text(figure, '' if percent else '{:.2f}')}, which must be {beyond[1]} {limit}"
            )
    imagined = last.get("imagined")
    if imagined is None:
        imagined = next((check["imagined"] for check in _json(run.gate).get("checks", [])[::-1]), None)
    mode = next((mode for mode in after.modes if mode != "greedy"), None) if after else None
    if imagined is not None and after is not None and mode is not None:
        rate = after.rate(mode)
        if rate.num_episodes and imagined - rate.interval.high > MAX_GAP:
            said.append(f"{100 * imagined:.0f} % success imagined where {rate.text()} are real")
    return said


def falls(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Tasks that fell and not by chance, for the top; and those that fell where all together rose, which may be chance.

    The second are of 5 points or more.
    """
    sure, perhaps = [], []
    for mode in comparison.modes:
        certain = [(r, p) for r, p in changed_tasks(comparison.results, mode) if r.difference < 0]
        for result, p_value in certain:
            rates = f"from {100 * result.rate_a:.1f} to {100 * result.rate_b:.1f} %"
            sure.append(f"{comparison.label(result)} fell {rates} ({mode}, p {format_p(p_value)} over all tasks)")
        named = {result.task for result, _ in certain}
        if comparison.result(mode).difference > 0:
            for r in comparison.results:
                if r.mode == mode and r.task not in (None, *named) and r.difference <= -0.05:
                    rates = f"from {100 * r.rate_a:.1f} to {100 * r.rate_b:.1f} %"
                    perhaps.append(f"{comparison.label(r)} fell {rates} ({mode}), which can be chance")
    return sure, perhaps


def protocol(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """The evaluation's protocol beside the benchmark's official one; None where there is none."""
    if evaluation is None or not evaluation.meta.official:
        return None
    rows = [(what, here, official, here == official) for what, (here, official) in evaluation.meta.official.items()]
    return {"rows": rows, "others": ", ".join(what for what, *_, same in rows if not same)}


def perturbed(folder: Path) -> list[dict[str, Any]]:
    """What each perturbation costs, a row each; the clean episodes first."""
    try:
        found = Robustness.load(RunFolder(folder).robustness)
    except EvaluationError:
        return []
    rows = []
    for rate in found.rates:
        low, high = (f"{100 * end:.1f}" for end in rate.interval)
        less = ", ".join(f"{100 * end:+.1f}" for end in rate.bootstrap)
        cells = [f"{100 * rate.rate:.1f} %", f"[{low}, {high}]"]
        cells += [f"{100 * rate.difference:+.1f} [{less}]", format_p(rate.p_value)] if rate.level else ["", ""]
        name = f"{rate.axis}, level {rate.level}" if rate.level else "clean"
        rows.append({"mode": rate.mode, "name": name, "clean": not rate.level, "cells": [*cells, rate.num_episodes]})
    return rows


def perturbed_clips(folder: Path) -> list[dict[str, Any]]:
    """One episode of each perturbed axis, as its page embeds it."""
    files = sorted(RunFolder(folder).perturbed.glob("*.mp4"))
    return [{"name": "{}, level {}".format(*file.stem.rsplit("-", 1)), "data": embedded(file)} for file in files]


def links(folder: Path) -> list[tuple[str, str]]:
    """The run's other pages and its policy that are there: what they are called, and where, from the folder."""
    run = RunFolder(folder)
    found = []
    if run.admission.is_file():
        page = Admission.model_validate_json(run.admission.read_bytes()).page
        if not page.is_file():  # The folder was moved, or copied from another machine.
            moved = (folder / Path(*page.parts[i:]) for i in range(1, len(page.parts)))
            page = next((path for path in moved if path.is_file()), page)
        if page.is_file():
            found.append(("how far the world model can be trusted", page))
    above = [folder.resolve().parent, folder.resolve().parent.parent]
    found += [("the whole run", RunFolder(path).report) for path in above if RunFolder(path).rounds.is_file()]
    inside = [run.policy, *sorted(folder.glob("*/policy")), *sorted(folder.glob("*/*/policy"))]
    pages = [*sorted(folder.glob("*/report.html")), *sorted(folder.glob("*/*/report.html"))]
    for path in pages:
        name = path.parent.name.replace("_", " ")
        what = "the control:" if "shuffled" in name or "control" in name else "the run"
        found.append((f"action errors of {name}" if path.parts[-3] == "action_errors" else f"{what} {name}", path))
    for path in inside:
        if path.is_dir() and "shuffled" not in path.parent.name:
            found.append(("the policy", path))
    return [(name, relpath(path.resolve(), folder.resolve())) for name, path in found]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
