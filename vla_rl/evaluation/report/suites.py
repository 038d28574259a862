"""Report section on a benchmark's suites: success by suite, their averages, and the tasks of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from vla_rl.evaluation.report.charts import BLUE, GRAY, Bar, bar_chart
from vla_rl.evaluation.report.read import Suites
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.suites import SuiteResults


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
        low, high = rate.interval
        lines.append(
            (
                f"{mode.capitalize()} success of {results.name} {over}.",
                f"95 % interval [{100 * low:.1f}, {100 * high:.1f}], n = {rate.num_episodes}, {rate.num_tasks} tasks.",
            )
        )
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
