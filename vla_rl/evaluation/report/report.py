"""The report of a run: one self-contained HTML page on gain, interval, learning curves and videos.

    write_report(Path("runs/tabletop_grpo"))   # -> runs/tabletop_grpo/report.html

Nothing is fetched when the page is opened: styles, charts and videos are inside it. What the
folder lacks is said on the page.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import RunFolder, read_changes
from vla_rl.config import read_written
from vla_rl.evaluation.compare import Comparison, PairedResult, format_p
from vla_rl.evaluation.foreign import file_of, is_foreign, read_evaluation
from vla_rl.evaluation.gate import OF_OTHERS
from vla_rl.evaluation.recorded import NOT_SUCCESS, ActionErrors
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import BLUE, GRAY, GREEN, ORANGE, PURPLE, Bar, Line, bar_chart, line_chart
from vla_rl.evaluation.report.read import Run, control_of, progress_lines, read_run, timing
from vla_rl.evaluation.report.sections import (
    broken_trust,
    falls,
    imagination,
    links,
    perturbed,
    perturbed_clips,
    protocol,
    rounds,
    suite_charts,
    suite_headline,
)
from vla_rl.evaluation.results import Evaluation, SuccessRate
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.evaluation.verdict import silent_groups
from vla_rl.evaluation.video import embedded

# Videos beyond this are left out, so that the page still opens.
MAX_VIDEO_BYTES = 24 * 2**20
_VIDEO = r"__(?P<task>.+)__(?P<mode>.+?)__(?P<split>[a-z]+)-(?P<index>\d+)__(?P<outcome>success|failure)"


def write_report(run_folder: Path, title: str | None = None, before: str = "base", after: str = "final") -> Path:
    """Write `report.html` into a run's folder and return its path.

    Args:
        title: by default the recipe's name.
        before, after: names of the evaluations (`evaluations/<name>.json`) to set against each other.
            With only one evaluation in the folder, whatever its name, the page shows that one; with several others, the
            newest.

    Raises:
        EvaluationError: `run_folder` does not exist.
    """
    run = read_run(Path(run_folder), before, after)
    return _write(RunFolder(run.folder).report, run, title)


def write_evaluation_report(file: Path, title: str | None = None) -> Path:
    """Write a page about one evaluation's file, ours or another program's, beside it, and return its path.

    Raises:
        EvaluationError: it cannot be read.
    """
    evaluation = read_evaluation(file)
    config = evaluation.meta.config
    missing = [evaluation.meta.protocol, *config["notes"]] if is_foreign(evaluation) else []
    run = Run(file, None, evaluation, None, None, [], None, "", {}, "", {}, None, missing)
    return _write(file_of(file)[0].with_suffix(".html"), run, title or evaluation.meta.name)


def _write(path: Path, run: Run, title: str | None) -> Path:
    template = page_template(__package__ or "", "report_template.html")
    write_text_atomic(path, template.render(_page(run, title)))
    return path


def _page(run: Run, title: str | None) -> dict[str, Any]:
    status = run.status
    clips, left_out = _clips(run)
    missing = run.missing + ([left_out] if left_out else [])
    evaluation = run.after
    commit = run.versions.get("git_commit")
    kicker = [
        "vla-rl run report",
        run.suites.results.env if run.suites else evaluation.meta.env_title if evaluation else "",
        evaluation.meta.created[:10] if evaluation else "",
        f"commit {commit}" if commit else "",
    ]
    shown = [e for e in (run.before, evaluation) if e is not None]
    fell = falls(run.comparison) if run.comparison else ([], [])
    return {
        "status": status.text() if status else "",
        "is_live": status is not None and status.is_running,
        "dashboard": status.dashboard if status else "",
        "title": title or run.recipe.get("name") or run.folder.resolve().name,
        "env_title": evaluation.meta.env_title if evaluation else "",
        "kicker": " · ".join(part for part in kicker if part),
        "headline": suite_headline(run.suites.results) if run.suites else _headline(run),
        "fell": fell[0],
        "broken": broken_trust(run.folder, evaluation),
        "official": protocol(evaluation),
        "perturbed": perturbed(run.folder),
        "perturbed_clips": perturbed_clips(run.folder),
        "links": links(run.folder),
        "cards": [_card(run, mode) for mode in _modes(evaluation)] if evaluation and not run.suites else [],
        "suites": suite_charts(run.suites, _task_bars) if run.suites else None,
        "warnings": [*fell[1], *warnings_of(run)],
        "protocol": _capitalised(evaluation.meta.protocol) if evaluation else "",
        "series": [(e.meta.name, color) for e, color in zip(shown, _colors(shown), strict=True)],
        "bars": [_task_bars(mode, shown) for mode in _modes(evaluation)] if evaluation and not run.suites else [],
        "before": run.before.meta.name if run.before else "",
        "after": evaluation.meta.name if evaluation else "",
        "p_name": run.comparison.p_name if run.comparison else "",
        "population": run.comparison.population if run.comparison else "",
        "paired_rows": _paired_rows(run.comparison) if run.comparison else [],
        "imagination": imagination(run.folder),
        "rounds": rounds(run.folder),
        "controls": _controls(run.ablation) if run.ablation else None,
        "curves": _curves(run.metrics, is_imagined=RunFolder(run.folder).admission.is_file()),
        "timing": timing(run.metrics),
        "progress": progress_lines(run.metrics),
        "clips": clips,
        "commands": _commands(run),
        "changes": change_texts(RunFolder(run.folder)),
        "config": run.config,
        "versions": list(run.versions.items()),
        "missing": missing,
    }


def _modes(evaluation: Evaluation | None) -> list[str]:
    """Sampled before greedy: it is what was trained."""
    return sorted(evaluation.modes, key=lambda mode: mode == "greedy") if evaluation else []


def _colors(shown: Sequence[Evaluation]) -> tuple[str, ...]:
    return (GRAY, BLUE)[2 - len(shown) :]


def _headline(run: Run) -> list[tuple[str, str]]:
    """The result, a (statement, evidence) for each mode; then what the controls say."""
    lines: list[tuple[str, str]] = []
    if run.comparison is not None:
        lines = [_change(run.comparison.result(mode)) for mode in _modes(run.after) if mode in run.comparison.modes]
    elif run.after is not None:
        for mode in _modes(run.after):
            rate = run.after.rate(mode)
            said = f"is {rate.text()}." if rate.num_episodes else "is not known: all episodes were lost."
            lines.append((f"{_capitalised(mode)} success of {run.after.meta.name} {said}", ""))
    of_rl = [g for g in run.ablation["gains"] if g["of"] == "RL"] if run.ablation else []
    if run.ablation and of_rl:
        gains = [g for g in of_rl if g["mode"].startswith("sampled")] or of_rl
        how = "sampled" if gains[0]["mode"].startswith("sampled") else gains[0]["mode"]
        num_seeds = len(run.ablation["seeds"])
        against = "; ".join(
            f"{_points(g['mean'])} over {g['over']} "
            + (_interval_text(g["interval"]) if num_seeds > 1 else f"(p = {format_p(g['p_values'][0])})")
            for g in gains
        )
        over = f"Over {num_seeds} seeds" if num_seeds > 1 else "Beside its control"
        lines.append((over, f"RL's {how} success, in points: {against}."))
    for file in sorted(RunFolder(run.folder).action_errors_of("any").parent.glob("*.json")):
        found = read_written(ActionErrors, file, OF_OTHERS)
        lines.append((f"On recordings, {found.name}: {found.headline()}", NOT_SUCCESS))
    return lines or [("This run has no evaluation yet,", "so there is no success rate to report.")]


def _change(result: PairedResult) -> tuple[str, str]:
    rates = f"from {_percent(result.rate_a)} to {_percent(result.rate_b)}"
    mode = f"{_capitalised(result.mode)} success"
    if result.p_value_by_state < 0.05:
        statement = f"{mode} {'rose' if result.gained > result.lost else 'fell'} {rates}."
    else:
        statement = f"{mode} went {rates}, which can be chance."
    return statement, (
        f"95 % intervals {_interval_text(result.interval_a, signed=False)} and "
        f"{_interval_text(result.interval_b, signed=False)}; difference {_points(result.difference)} points "
        f"{_interval_text(result.bootstrap)} on {result.num_pairs} episodes from the same initial states; "
        f"{result.gained} gained, {result.lost} lost, exact {result.p_name} = {format_p(result.p_value_by_state)}."
    )


def warnings_of(run: Run) -> list[str]:
    """What to know before believing a run's figures."""
    warnings = list(run.comparison.warnings) if run.comparison else []
    if control := control_of(run):
        warnings.insert(0, f"This run is a negative control ({control}): what it gains is no gain of the recipe's.")
    elif run.comparison and (run.ablation is None or len(run.ablation["seeds"]) == 1):
        what = "without its controls" if run.ablation is None else "with one seed"
        warnings.append(
            f"This is one run {what}. Runs with shuffled rewards can gain too: `vla-rl sweep --controls 3` "
            "repeats it with three seeds and both controls."
        )
    if run.after and run.after.meta.split != "eval":
        warnings.append(f"Measured on the {run.after.meta.split} split, not on eval; no claim should rest on it.")
    return warnings + silent_groups(run.metrics)


def _card(run: Run, mode: str) -> dict[str, Any]:
    assert run.after is not None, "a card shows an evaluation"
    after = run.after.rate(mode)
    temperature = run.after.meta.temperatures.get(mode)
    drawn = "" if temperature is None else f", temperature {temperature:g}"
    card = {
        "name": f"{_capitalised(mode)} success{drawn}, all tasks",
        "after": _percent(after.rate),
    }
    details = [_rate_detail(run.after.meta.name, after)]
    card["before"] = ""
    if run.before is not None and mode in run.before.modes:
        before = run.before.rate(mode)
        card["before"] = _percent(before.rate)
        details.insert(0, _rate_detail(run.before.meta.name, before))
    return {**card, "details": details}


def _rate_detail(name: str, rate: SuccessRate) -> str:
    steps = f", {rate.mean_steps_to_success:.0f} steps to success" if rate.mean_steps_to_success > 0 else ""
    lost = f", {rate.num_lost} lost episodes left out" if rate.num_lost else ""
    return f"{name}: {rate.text()}{steps}{lost}"


def _task_bars(mode: str, shown: Sequence[Evaluation]) -> Markup:
    with_mode = [(e, color) for e, color in zip(shown, _colors(shown), strict=True) if mode in e.modes]
    rows = []
    for task in [*shown[-1].tasks, None]:
        bars = []
        for evaluation, color in with_mode:
            if task is None or task in evaluation.tasks:
                rate = evaluation.rate(mode, task)
                if rate.num_episodes:
                    bars.append(Bar(rate.rate, rate.interval, f"n = {rate.num_episodes}", color))
        rows.append((task or "all tasks", bars))
    labels = shown[-1].labels
    return Markup(bar_chart(f"{_capitalised(mode)} success", rows, labels))


def _paired_rows(comparison: Comparison) -> list[dict[str, Any]]:
    rows = []
    for r in sorted(comparison.results, key=lambda r: r.mode == "greedy"):
        cells = [
            _percent(r.rate_a),
            _percent(r.rate_b),
            _points(r.difference),
            _interval_text(r.bootstrap),
            f"{r.gained} / {r.lost}",
            str(r.num_pairs),
            format_p(r.p_value_by_state),
        ]
        task = {"task": comparison.label(r) or "all tasks", "full": r.task or ""}
        rows.append({"mode": r.mode, **task, "total": r.task is None, "cells": cells})
    return rows


def _controls(ablation: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "mode": gain["mode"],
            "name": f"{gain['of']} − {gain['over']}",
            "main": gain["of"] == "RL",
            "mean": _points(gain["mean"]),
            "interval": _interval_text(gain["interval"]),
            "per_seed": ", ".join(_points(d) for d in gain["per_seed"]),
            "p_values": ", ".join(format_p(p) for p in gain["p_values"]),
        }
        for gain in ablation["gains"]
    ]
    seeds = ", ".join(str(seed) for seed in ablation["seeds"])
    lead = (
        f"Seeds {seeds}, {ablation['num_episodes']} episodes per seed and mode. Intervals are 95 %, for a new seed on "
        f"new initial states: Student's t over the seeds, widened by what the states add. {SEEDS_ALIKE} A gain counts "
        "when it exceeds both controls': rewards shuffled over all trajectories, and as many updates of behavior "
        "cloning."
    )
    return {"lead": lead, "rows": rows}


def _curves(metrics: Sequence[Mapping[str, float]], is_imagined: bool) -> list[Markup]:
    """Success, then every loss, KL, clip fraction and entropy that was logged; `is_imagined`: by a world model."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in metrics:
        for key, value in row.items():
            if key != "step":
                series[key].append((row["step"], value))
    imagined = is_imagined or "gate/real" in series
    if imagined:  # From keyframes it is not to be compared with the real one.
        series["train/success"] = [(row["step"], _from_start(row)) for row in metrics if "train/success" in row]
    trained = "imagined, sampled" if imagined else "train, sampled"
    success = [
        Line(name, series[key], color, marked)
        for key, name, color, marked in (
            ("train/success", trained, ORANGE, False),
            ("train/success_by_simulator", "train, sampled, by the simulator", PURPLE, False),
            ("gate/real", "real, sampled", PURPLE, True),
            ("gate/executed", "imagined actions, executed", GRAY, True),
            ("validation/sampled", "validation, sampled", BLUE, True),
            ("validation/greedy", "validation, greedy", GREEN, True),
        )
        if series.get(key)
    ]
    title = "Success" if len(success) > 1 else f"Success: {success[0].name}" if success else ""  # One has no legend.
    charts = [line_chart(title, success, percent=True)] if success else []
    for key, points in series.items():
        if key.startswith("loss/"):
            charts.append(line_chart(f"Loss: {key.removeprefix('loss/').replace('_', ' ')}", [Line("", points, BLUE)]))
    for title, word in (("KL divergence", "kl"), ("Clipped fraction", "clip_fraction"), ("Entropy", "entropy")):
        keys = [key for key in series if word in key.rpartition("/")[2]]
        lines = [
            Line(key.rpartition("/")[2].replace("_", " "), series[key], color)
            for key, color in zip(keys, (BLUE, ORANGE, GREEN, PURPLE), strict=False)
        ]
        charts += [line_chart(title, lines)] if lines else []
    return [Markup(chart) for chart in charts if chart]


def _from_start(row: Mapping[str, float]) -> float:
    """Success of an iteration's episodes from initial states; NaN where all began from keyframes."""
    has_others = "train/success_from_keyframes" in row
    return row.get("train/success_from_start", math.nan) if has_others else row["train/success"]


def _clips(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Videos by task, one side per evaluation; and what had to be left out."""
    names = [e.meta.name for e in (run.before, run.after) if e is not None]
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or ".+?"
    video = re.compile(f"(?P<name>{known}){_VIDEO}")
    by_task: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    num_bytes, num_left_out = 0, 0
    for path in sorted(RunFolder(run.folder).videos.glob("*.mp4")):
        match = video.fullmatch(path.stem)
        if match is None:
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MAX_VIDEO_BYTES:
            num_left_out += 1
            continue
        by_task[match["task"]][match["name"]].append(
            {
                "success": match["outcome"] == "success",
                "state": f"{match['mode']}, {match['split']} state {int(match['index'])}",
                "data": embedded(path),
            }
        )
    if not by_task:
        return [], "videos: none in the folder"
    shown = names or sorted({name for sides in by_task.values() for name in sides})
    order = run.after.tasks if run.after else []
    tasks = [
        {
            "name": run.after.labels.get(task, task) if run.after else task,
            "full": task,
            "sides": [{"name": n, "clips": sorted(sides[n], key=lambda c: not c["success"])} for n in shown],
        }
        for task, sides in sorted(by_task.items(), key=lambda item: [t != item[0] for t in order])
    ]
    return tasks, f"{num_left_out} videos beyond {MAX_VIDEO_BYTES >> 20} MiB; see videos/" if num_left_out else ""


def _commands(run: Run) -> list[str]:
    commands = [run.command] if run.command else []
    if run.comparison is not None:
        first, second = run.comparison.name_a, run.comparison.name_b
        files = (str(RunFolder(run.folder).evaluation(name)) for name in (first, second))
        commands.append(shlex.join(["vla-rl", "compare", *files]))
    return commands


def _percent(rate: float) -> str:
    return "–" if math.isnan(rate) else f"{100 * rate:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _interval_text(interval: Sequence[float | None], signed: bool = True) -> str:
    low, high = interval
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return "(no interval: needs three seeds)"
    if signed:
        return f"[{_points(low)}, {_points(high)}]"
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def change_texts(run: RunFolder) -> list[str]:
    """What was changed when a run was resumed, a line each time, for its report."""
    lines = []
    for change in read_changes(run):
        parts = (f"{name} from {pair['from']} to {pair['to']}" for name, pair in change["changed"].items())
        lines.append(f"{change['time'].replace('T', ' ')}, after step {change['after'] or 0}: {', '.join(parts)}")
    return lines
