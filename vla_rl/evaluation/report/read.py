"""Reader of a run's folder, for its report and its card."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vla_rl.common.progress import RunStatus, read_status
from vla_rl.common.run_folder import RunFolder, command_of, read_metrics
from vla_rl.config import ConfigError, Loader
from vla_rl.evaluation.compare import Comparison, compare
from vla_rl.evaluation.results import Evaluation, EvaluationError
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
