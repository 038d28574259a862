"""Reader of a run's folder, for its report and its card; and the text that says where the run is."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markupsafe import Markup

from vla_rl.common.progress import RunStatus, read_status
from vla_rl.common.run_folder import RunFolder, command_of, read_metrics
from vla_rl.config import ConfigError, Loader
from vla_rl.evaluation.compare import Comparison, compare
from vla_rl.evaluation.report.charts import stacked_bar
from vla_rl.evaluation.results import Evaluation, EvaluationError, unfinished
from vla_rl.evaluation.suites import SuiteResults


class Suites(NamedTuple):
    """A benchmark's suites side by side, and of each whose evaluation can be read, by name, that."""

    results: SuiteResults
    evaluations: dict[str, Evaluation]


class Run(NamedTuple):
    """What a run's folder holds.

    Attributes:
        suites: where `after` is of one of a benchmark's suites, all of them; `before` is None then.
        status: where the run is; None where it does not say. recipe: what `config`, text, says.
        missing: what the folder does not hold, for people.
    """

    folder: Path
    before: Evaluation | None
    after: Evaluation | None
    comparison: Comparison | None
    suites: Suites | None
    metrics: list[dict[str, float]]
    ablation: dict[str, Any] | None
    config: str
    recipe: dict[str, Any]
    command: str
    versions: dict[str, Any]
    status: RunStatus | None
    missing: list[str]


def read_run(folder: Path, before: str = "base", after: str = "final") -> Run:
    """Read what there is of a run; parts that are missing or unreadable are listed, not raised."""
    if not folder.is_dir():
        raise EvaluationError(f"run folder not found: {folder}")
    missing: list[str] = []
    run = RunFolder(folder)

    def text(path: Path) -> str:
        if path.is_file():
            return path.read_text().strip()
        missing.append(f"{path.name}: not in the folder")
        return ""

    def parsed(path: Path, required: bool = True) -> dict[str, Any] | None:
        if not required and not path.is_file():
            return None
        try:
            return json.loads(text(path) or "null")
        except json.JSONDecodeError as error:
            missing.append(f"{path.name}: not valid JSON ({error})")
            return None

    results = _read_suites(run, missing)
    found = _read_evaluations(folder, before, after, results, missing)
    suites = None
    if results is not None and found[1] is not None and found[1].meta.name in results.evaluations.values():
        suites = Suites(results, _read_each(run, results, missing))
    comparison = None
    if found[0] is not None and found[1] is not None:
        try:
            comparison = compare(found[0], found[1])
        except EvaluationError as error:
            missing.append(str(error))
    metrics: list[dict[str, float]] = []
    try:
        metrics = read_metrics(run.metrics)
    except FileNotFoundError:
        if command_of(run) != "eval":
            missing.append(f"learning curves and timing: no {run.metrics.name}")
    except ValueError as error:
        missing.append(str(error))
    ablation = parsed(run.ablation, required=False)
    config, command, versions = text(run.config), text(run.command), parsed(run.versions) or {}
    recipe = _recipe(config, missing)
    status = _read_status(run, missing)
    return Run(
        folder, *found, comparison, suites, metrics, ablation, config, recipe, command, versions, status, missing
    )


def _read_status(run: RunFolder, missing: list[str]) -> RunStatus | None:
    try:
        return read_status(run.status)
    except ConfigError as error:
        missing.append(str(error))
        return None


def _read_suites(run: RunFolder, missing: list[str]) -> SuiteResults | None:
    try:
        return SuiteResults.load(run.suites) if run.suites.is_file() else None
    except EvaluationError as error:
        missing.append(str(error))
        return None


def _read_each(run: RunFolder, results: SuiteResults, missing: list[str]) -> dict[str, Evaluation]:
    found = {}
    for suite, name in results.evaluations.items():
        try:
            found[suite] = Evaluation.load(run.evaluation(name))
        except EvaluationError as error:
            missing.append(str(error))
    return found


def _read_evaluations(
    folder: Path, before: str, after: str, suites: SuiteResults | None, missing: list[str]
) -> tuple[Evaluation | None, Evaluation | None]:
    files = {path.stem: path for path in sorted(RunFolder(folder).evaluations.glob("*.json"))}
    if len(files) == 1:
        before, after = "", next(iter(files))
    loaded: list[Evaluation | None] = []
    if not {before, after} & files.keys() and (newest := _newest(files.values())) is not None:
        together = suites.evaluations.values() if suites and newest.meta.name in suites.evaluations.values() else ()
        others = ", ".join(name for name in files if name != newest.meta.name and name not in together)
        if others:
            missing.append(f"evaluations: the page shows the newest, {newest.meta.name}; also in the folder: {others}")
        return None, newest
    for name in (before, after):
        evaluation = None
        if name in files:
            try:
                evaluation = Evaluation.load(files[name])
            except EvaluationError as error:
                missing.append(str(error))
        elif name:
            others = f" (found: {', '.join(files)})" if files else ""
            missing.append(f"evaluations/{name}.json: not in the folder{others}")
        loaded.append(evaluation)
    first, second = loaded
    return (None, first) if second is None else (first, second)


def _newest(files: Iterable[Path]) -> Evaluation | None:
    """The evaluation that was made last, of those that can be read."""
    found = []
    for file in files:
        with suppress(EvaluationError):
            found.append(Evaluation.load(file))
    return max(found, key=lambda evaluation: evaluation.meta.created, default=None)


def _recipe(config: str, missing: list[str]) -> dict[str, Any]:
    try:
        values = yaml.load(config, Loader)
    except yaml.YAMLError as error:
        missing.append(f"config.yaml: not valid YAML ({error})")
        return {}
    return values if isinstance(values, dict) else {}


def made_by(run: Run) -> str:
    """The command that made a run, or of `vla-rl train` its recipe's kind; of a loop's it is the RL alone."""
    command, kind = command_of(RunFolder(run.folder)), str(run.recipe.get("run", "train"))
    return kind if command == "train" and kind != "loop" else command


def control_of(run: Run) -> str:
    """The option that makes the run a negative control, as NAME=VALUE; empty: it is none."""
    section = made_by(run)
    options = run.recipe.get(section)
    value = options.get("control", "none") if isinstance(options, dict) else "none"
    return "" if value == "none" else f"{section}.control={value}"


STAGES = ("simulation", "inference", "forward_backward", "optimizer", "other")


def status_lines(run: RunFolder) -> list[str]:
    """Say the step that a run is at, how its last iteration went, and what its rollouts lost and redid in all.

    Of a run without iterations, such as a fit, what it logged last.
    """
    status, lines = read_status(run.status), [f"run: {run.path}"]
    if status is not None:
        lines.append(status.text() or f"This run is finished. As of {status.updated.replace('T', ' ')}.")
        if status.is_running and status.dashboard:
            lines.append(f"machines: {status.dashboard} (Ray's dashboard)")
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    evaluations = _evaluation_lines(run)
    logged = progress_lines(metrics) or _last_logged(run, metrics)
    return lines + (logged + evaluations or ["No iteration has ended yet."])


def _evaluation_lines(run: RunFolder) -> list[str]:
    """Say what the run has evaluated, and how far it is with what it has not."""
    ended = [f"evaluation {file.stem}: finished" for file in sorted(run.evaluations.glob("*.json"))]
    begun = unfinished(run.evaluations) | unfinished(run.perturbed)
    return ended + [
        f"evaluation {name}: {done:,} of {total:,} episodes have ended" for name, (done, total) in begun.items()
    ]


def _last_logged(run: RunFolder, metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """What a run without iterations of RL, such as a fit or cloning, logged last; nothing where it has not yet."""
    if not metrics:
        return []
    at = datetime.fromtimestamp(run.metrics.stat().st_mtime).isoformat(" ", timespec="seconds")
    values = [f"{name} {value:.3g}" for name, value in metrics[-1].items() if name != "step"]
    return [f"logged last, at {at}: step {metrics[-1]['step']:.0f}, {', '.join(values)}"]


def progress_lines(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """Say how the last iteration went, and what its rollouts lost and redid in all; nothing where none has ended."""
    rows = [row for row in metrics if {"train/episodes", "train/success", "time/total"} <= row.keys()]
    if not rows:
        return []
    last = rows[-1]
    lines = [
        f"iteration {len(rows)}: {last['train/episodes']:.0f} episodes, {100 * last['train/success']:.0f} % solved, "
        f"{last['train/episodes'] / last['time/total']:.2f} episodes/s with the update"
    ]
    # A source that works ahead acts meanwhile: no stage of the training process's own.
    stages = [stage for stage in STAGES if last.get(f"time/{stage}", 0.0) > 0]
    lines.append("time: " + ", ".join(_share(last, stage) for stage in stages))
    return lines + _rollout_lines(rows)


def _share(row: Mapping[str, float], stage: str) -> str:
    return f"{stage.replace('_', ' ')} {100 * row[f'time/{stage}'] / row['time/total']:.0f} %"


def _rollout_lines(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What a source of many processes logged; nothing of a run whose episodes run in its own process."""
    last = {name.removeprefix("rollout/"): value for name, value in rows[-1].items() if name.startswith("rollout/")}
    if "stood_s" not in last:
        return []
    lines = []
    if "envs_busy" in last:
        envs, policy = 100 * last["envs_busy"], 100 * last["policy_busy"]
        lines.append(f"busy: environments {envs:.0f} % of the time, the policy in the rollouts {policy:.0f} %")
    if "lag" in last:
        busy = f"{last['running']:.0f} episodes running, {last['waiting']:.0f} waiting for an environment"
        ahead = f"{last['groups_under_way']:.0f} groups under way, {last['lag']:.2f} updates old on average"
        lines.append(
            f"rollouts: {last['hosts']:.0f} hosts, {busy}, {last['asking']:.0f} for the policy; {ahead}, at most "
            f"{last['lag_max']:.0f}"
        )
    names = ("hosts_lost", "workers_lost", "moved", "redone", "groups_dropped", "stood_s")
    hosts, workers, moved, redone, dropped, stood = (sum(r.get(f"rollout/{n}", 0.0) for r in rows) for n in names)
    lines.append(
        f"lost in all: {hosts:.0f} hosts, {workers:.0f} workers; {moved:.0f} episodes went on elsewhere, {redone:.0f} "
        f"were begun again, {dropped:.0f} groups were too old; stood for {stood:.0f} s"
    )
    return lines


STAGE_NAMES = {"simulation": "simulation and rendering", "inference": "policy forward, rollout"}


def timing(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Seconds by stage, summed over the iterations, as a lead and a chart; None where none were logged."""
    seconds: dict[str, float] = defaultdict(float)
    totals = []
    for row in metrics:
        for key, value in row.items():
            stage = key.removeprefix("time/")
            if stage == key or stage.endswith(("fraction", "per_second")) or not math.isfinite(value):
                continue
            if stage == "total":
                totals.append(value)
            else:
                seconds[stage] += value
    seconds = defaultdict(float, {stage: value for stage, value in seconds.items() if value > 0})
    if not seconds:
        return None
    stages = sorted(seconds, key=lambda stage: (stage == "other", -seconds[stage]))
    named = {STAGE_NAMES.get(stage, stage.replace("_", " ")): seconds[stage] for stage in stages}
    total = sum(totals) or sum(seconds.values())
    lead = f"{_duration(total)} in {len(totals)} iterations, {total / len(totals):.1f} s each." if totals else ""
    return {"lead": lead, "chart": Markup(stacked_bar("Share of wall time", named))}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
