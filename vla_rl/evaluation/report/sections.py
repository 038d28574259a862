"""Sections of a report: trust that RL broke, tasks that fell, another protocol than the official one; suites; the loop.

Also what perturbations cost, and where the run's other pages and parts lie.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from os.path import relpath
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel

from vla_rl.common.run_folder import RunFolder
from vla_rl.config import read_written
from vla_rl.evaluation.compare import Comparison, format_p
from vla_rl.evaluation.gate import OF_OTHERS, read_gate
from vla_rl.evaluation.report.charts import BLUE, GRAY, Bar, bar_chart
from vla_rl.evaluation.report.read import Suites
from vla_rl.evaluation.results import Evaluation, EvaluationError
from vla_rl.evaluation.robustness import Robustness
from vla_rl.evaluation.statistics import Interval
from vla_rl.evaluation.suites import SuiteResults
from vla_rl.evaluation.verdict import changed_tasks
from vla_rl.evaluation.video import embedded
from vla_rl.interfaces import Admission, TrustClip, Verdict

MAX_GAP = 0.1  # Imagined less real success, unless the run's own requirement says otherwise.


def broken_trust(folder: Path, after: Evaluation | None) -> list[str]:
    """Bounds of the world model's trust that surely do not hold after RL: a figure's whole interval lies beyond."""
    run = RunFolder(folder)
    if not run.admission.is_file():
        return []
    admission = read_written(Admission, run.admission, OF_OTHERS)
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
    imagined, check = last.get("imagined"), next(iter(read_gate(run.gate).checks[::-1]), None)
    if check is not None and check.stop_text:
        said.append(check.stop_text)
    if imagined is None and check is not None:
        imagined = check.imagined
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
        less = f"{100 * rate.difference:+.1f} {rate.bootstrap.percent('+')}"
        cells = [f"{100 * rate.rate:.1f} %", rate.interval.percent()]
        cells += [less, format_p(rate.p_value)] if rate.level else ["", ""]
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
        page = read_written(Admission, run.admission, OF_OTHERS).page
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


def suite_headline(results: SuiteResults) -> list[tuple[str, str]]:
    """(statement, evidence) for each mode: the average over the suites, or what the only one says."""
    lines = []
    for mode in _modes(results):
        rate = [rate for rate in results.rates if rate.mode == mode][-1]
        over = (
            f"averages {100 * rate.rate:.1f} % over {len(rate.suites)} suites"
            if rate.is_average
            else (f"is {100 * rate.rate:.1f} % on {rate.label}")
        )
        evidence = f"95 % interval {rate.interval.percent()}, n = {rate.num_episodes}, {rate.num_tasks} tasks."
        lines.append((f"{mode.capitalize()} success of {results.name} {over}.", evidence))
    return lines


def suite_charts(suites: Suites, task_bars: Callable[[str, list[Evaluation]], Markup]) -> dict[str, Any]:
    """Charts of the suites, one a mode, and of each suite's tasks.

    Args:
        task_bars: makes a mode's chart of an evaluation's tasks.
    """
    modes = _modes(suites.results)
    labels = {rate.suites[0]: rate.label for rate in suites.results.rates if not rate.is_average}
    tasks = [
        {
            "label": labels[suite],
            "protocol": evaluation.meta.protocol,
            "charts": [task_bars(mode, [evaluation]) for mode in modes],
        }
        for suite, evaluation in suites.evaluations.items()
    ]
    return {"charts": [_chart(suites.results, mode) for mode in modes], "tasks": tasks}


def _chart(results: SuiteResults, mode: str) -> Markup:
    rows = [
        (rate.label, [Bar(rate.rate, rate.interval, f"n = {rate.num_episodes}", GRAY if rate.is_average else BLUE)])
        for rate in results.rates
        if rate.mode == mode
    ]
    return Markup(bar_chart(f"{mode.capitalize()} success", rows))


def _modes(results: SuiteResults) -> list[str]:
    """Sampled before greedy: it is what was trained."""
    return sorted(results.modes, key=lambda mode: mode == "greedy")


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
    admission, gate = read_written(Admission, file, OF_OTHERS), read_gate(RunFolder(folder).gate)
    return {
        "problem": admission.problem,
        "verdicts": [verdict.model_dump() | {"state": _state(verdict)} for verdict in admission.verdicts],
        "page": str(admission.page),
        "checks": [check.text() for check in gate.checks],
        "power": gate.power,
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
        "real": [f"{100 * rate:.1f} % {Interval(*ends).percent()}" for rate, *ends in row["real"].values()],
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


def _clips(report: Path) -> list[dict[str, Any]]:
    """Imagined-beside-real clips of the trust report: one of each outcome, then more."""
    if not report.is_file():
        return []
    seen: dict[tuple[bool, bool], int] = {}
    ranked = []
    for clip in read_written(TrustClips, report, OF_OTHERS).clips:
        outcome = (clip.real, clip.imagined)
        seen[outcome] = seen.get(outcome, 0) + 1
        ranked.append((seen[outcome], clip))
    shown = []
    for _, clip in sorted(ranked, key=lambda pair: pair[0]):
        file = report.parent / clip.file
        if len(shown) < MAX_CLIPS and file.is_file() and file.stat().st_size <= MAX_CLIP_BYTES:
            shown.append(clip.model_dump() | {"data": embedded(file)})
    return shown
