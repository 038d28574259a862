"""The table of a benchmark of perturbed tasks: success by dimension and difficulty level, and in total."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from vla_rl.evaluation.results import Evaluation, SuccessRate


def dimension_table(evaluations: Sequence[Evaluation]) -> Table:
    """For the console: per mode each dimension's levels, the dimension, and the total over all suites' episodes.

    Args:
        evaluations: one, or one for each suite, with `EvaluationMeta.groups`. An episode weighs the same in each row.
    """
    first = evaluations[0].meta
    suites = ", ".join(evaluation.meta.env_title for evaluation in evaluations)
    table = Table(title=f"{first.name} on {suites}, {first.split} split", title_justify="left")
    table.box, table.pad_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
    for name in ("mode", "dimension", "level", "success", "95 % interval", "n", "states"):
        table.add_column(name, justify="left" if name in ("mode", "dimension") else "right", no_wrap=True)
    notes = [note for e in evaluations if "left out" in (note := e.meta.official.get("tasks", ("", ""))[0])]
    table.caption, table.caption_justify = "; ".join(notes) or None, "left"
    groups = {task: group for evaluation in evaluations for task, group in evaluation.meta.groups.items()}
    for mode in evaluations[0].modes:
        for dimension in dict.fromkeys(name for name, _ in groups.values()):
            levels = sorted({level for name, level in groups.values() if name == dimension})
            for level in levels if levels != [0] else []:
                some = {task for task, group in groups.items() if group == (dimension, level)}
                _add(table, dimension, str(level or "none"), _rate(evaluations, mode, some))
            whole = {task for task, (name, _) in groups.items() if name == dimension}
            _add(table, dimension, "", _rate(evaluations, mode, whole), style="bold")
        _add(table, "total", "", _rate(evaluations, mode, set(groups)), style="bold")
    return table


def _rate(evaluations: Sequence[Evaluation], mode: str, tasks: set[str]) -> SuccessRate:
    chosen = [episode for evaluation in evaluations for episode in evaluation.select(mode) if episode.task in tasks]
    return SuccessRate.of(mode, None, chosen)


def _add(table: Table, dimension: str, level: str, rate: SuccessRate, style: str | None = None) -> None:
    if rate.num_episodes:
        ends = f"{100 * rate.interval.low:.1f} - {100 * rate.interval.high:.1f}"
        cells = (rate.mode, dimension, level, f"{100 * rate.rate:.1f} %", ends, rate.num_episodes, rate.num_states)
        table.add_row(*map(str, cells), style=style, end_section=bool(style))
