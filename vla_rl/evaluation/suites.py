"""Results over a benchmark's suites, as papers print them: a row a suite, their averages, Markdown and LaTeX.

results = SuiteResults.load("runs/x/suites.json")
print(results.markdown())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.saved import Saved
from vla_rl.common.tables import console_table, markdown_table
from vla_rl.config import Config
from vla_rl.evaluation.results import Evaluation, EvaluationError, SuccessRate
from vla_rl.evaluation.statistics import Interval, mean_interval


class SuiteRate(Config):
    """Success on one suite, or on average over several.

    Attributes:
        label: what papers call the suite, or "average of" and the labels.
        suites: by name; several of an average, which weighs them alike, whatever their numbers of episodes.
        num_tasks, num_episodes: together. policy: its path, and policy_hash the SHA-256 of its files; None of an
            average over several policies.
        rate: with `interval`, 95 %.
    """

    mode: str
    label: str
    suites: tuple[str, ...]
    num_tasks: int
    num_episodes: int
    rate: float
    interval: Interval
    policy: str | None = None
    policy_hash: str | None = None

    @property
    def is_average(self) -> bool:
        return len(self.suites) > 1


class SuiteResults(Saved):
    """Every suite of one evaluation, and the averages."""

    WHAT = "suites' results"
    ERROR = EvaluationError
    AGAIN = "Evaluate with `vla-rl eval --suites`."
    name: str
    env: str
    split: str
    rates: tuple[SuiteRate, ...]

    @staticmethod
    def of(
        name: str, evaluations: Mapping[str, Evaluation], labels: Mapping[str, str], averages: Sequence[Sequence[str]]
    ) -> SuiteResults:
        """Put the suites' evaluations, by suite, beside one another.

        Args:
            labels: suite -> what papers call it. averages: the suites of each average; those of one suite are left out.

        Raises:
            EvaluationError: the evaluations differ in split or modes, or one holds no counted episode.
        """
        first, *others = evaluations.values()
        for other in others:
            if (other.meta.split, other.modes) != (first.meta.split, first.modes):
                raise EvaluationError(
                    f"{other.meta.env_title}: split {other.meta.split}, modes {', '.join(other.modes)}; of "
                    f"{first.meta.env_title} {first.meta.split}, {', '.join(first.modes)}. Evaluate them alike."
                )
        rates = []
        for mode in first.modes:
            by_suite = {suite: _of_suite(mode, suite, labels[suite], e) for suite, e in evaluations.items()}
            rates += by_suite.values()
            rates += [_average([by_suite[suite] for suite in chosen]) for chosen in averages if len(chosen) > 1]
        return SuiteResults(name=name, env=first.meta.env, split=first.meta.split, rates=tuple(rates))

    @property
    def modes(self) -> list[str]:
        """Modes, in the order evaluated."""
        return list(dict.fromkeys(r.mode for r in self.rates))

    @property
    def evaluations(self) -> dict[str, str]:
        """Suite -> the name of its evaluation in the run's folder."""
        return {suite: f"{self.name}-{suite}" for rate in self.rates if not rate.is_average for suite in rate.suites}

    def table(self) -> Table:
        """A table for the console, 80 columns wide."""
        title = f"{self.name} on {self.env}, {self.split} split"
        table = console_table(title, _COLUMNS, ("mode", "suite"), "averages weigh each suite alike")
        for place, rate in enumerate(self.rates):
            last = place + 1 == len(self.rates) or self.rates[place + 1].mode != rate.mode
            table.add_row(*_cells(rate), style="bold" if rate.is_average else None, end_section=last)
        return table

    def markdown(self) -> str:
        """The table for a page."""
        return markdown_table(_COLUMNS, [*map(_cells, self.rates)]) + "\n"

    def latex(self) -> str:
        """Lines for a paper's tabular: a comment with what was run, the columns' heads, and a row for each mode."""
        first = [rate for rate in self.rates if rate.mode == self.modes[0]]
        counts = ", ".join(f"{r.label} {r.num_tasks} tasks, n = {r.num_episodes}" for r in first if not r.is_average)
        heads = " & ".join(["Policy", *(rate.label for rate in first)])
        lines = [
            f"% {self.name} on {self.env}, {self.split} split: success, %, 95 % intervals; {counts}",
            f"{heads} \\\\",
        ]
        for mode in self.modes:
            cells = [f"{_percent(r.rate)} {{\\scriptsize [{_ends(r, ', ')}]}}" for r in self.rates if r.mode == mode]
            name = self.name if len(self.modes) == 1 else f"{self.name} ({mode})"
            lines.append(" & ".join([name.replace("_", "\\_"), *cells]) + " \\\\")
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        """Write JSON, and beside it .md and .tex, each atomically."""
        super().save(path)
        write_text_atomic(path.with_suffix(".md"), self.markdown())
        write_text_atomic(path.with_suffix(".tex"), self.latex())


_COLUMNS = ("mode", "suite", "success, %", "95 % interval", "n", "tasks")


def _of_suite(mode: str, suite: str, label: str, evaluation: Evaluation) -> SuiteRate:
    rate = evaluation.rate(mode)
    if rate.num_episodes == 0:
        raise EvaluationError(f"{evaluation.meta.env_title}: every episode of mode {mode} was lost; evaluate it again")
    return SuiteRate(
        mode=mode,
        label=label,
        suites=(suite,),
        num_tasks=len(evaluation.tasks),
        num_episodes=rate.num_episodes,
        rate=rate.rate,
        interval=rate.interval,
        policy=evaluation.meta.policy,
        policy_hash=evaluation.meta.policy_hash,
    )


def _average(rates: Sequence[SuiteRate]) -> SuiteRate:
    policies = {(rate.policy, rate.policy_hash) for rate in rates}
    policy, policy_hash = policies.pop() if len(policies) == 1 else (None, None)
    return SuiteRate(
        mode=rates[0].mode,
        label=f"average of {len(rates)}",
        suites=tuple(rate.suites[0] for rate in rates),
        num_tasks=sum(rate.num_tasks for rate in rates),
        num_episodes=sum(rate.num_episodes for rate in rates),
        rate=sum(rate.rate for rate in rates) / len(rates),
        interval=mean_interval([rate.rate for rate in rates], [rate.interval for rate in rates]),
        policy=policy,
        policy_hash=policy_hash,
    )


def _cells(rate: SuiteRate) -> list[str]:
    ends = _ends(rate, " - ")
    return [rate.mode, rate.label, _percent(rate.rate), ends, str(rate.num_episodes), str(rate.num_tasks)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _ends(rate: SuiteRate, between: str) -> str:
    return between.join(_percent(end) for end in rate.interval)


# --- a benchmark of perturbed tasks: by dimension and level -------------------------------------


def dimension_table(evaluations: Sequence[Evaluation]) -> Table:
    """For the console: per mode each dimension's levels, the dimension, and the total over all suites' episodes.

    Args:
        evaluations: one, or one for each suite, with `EvaluationMeta.groups`. An episode weighs the same in each row.
    """
    first = evaluations[0].meta
    suites = ", ".join(evaluation.meta.env_title for evaluation in evaluations)
    notes = [note for e in evaluations if "left out" in (note := e.meta.official.get("tasks", ("", ""))[0])]
    head = ("mode", "dimension", "level", "success", "95 % interval", "n", "states")
    title = f"{first.name} on {suites}, {first.split} split"
    table = console_table(title, head, ("mode", "dimension"), "; ".join(notes))
    groups = {task: group for evaluation in evaluations for task, group in evaluation.meta.groups.items()}
    for mode in evaluations[0].modes:
        for dimension in dict.fromkeys(name for name, _ in groups.values()):
            levels = sorted({level for name, level in groups.values() if name == dimension})
            for level in levels if levels != [0] else []:
                some = {task for task, group in groups.items() if group == (dimension, level)}
                _add(table, dimension, str(level or "none"), _rate_of(evaluations, mode, some))
            whole = {task for task, (name, _) in groups.items() if name == dimension}
            _add(table, dimension, "", _rate_of(evaluations, mode, whole), style="bold")
        _add(table, "total", "", _rate_of(evaluations, mode, set(groups)), style="bold")
    return table


def _rate_of(evaluations: Sequence[Evaluation], mode: str, tasks: set[str]) -> SuccessRate:
    chosen = [episode for evaluation in evaluations for episode in evaluation.select(mode) if episode.task in tasks]
    return SuccessRate.of(mode, None, chosen)


def _add(table: Table, dimension: str, level: str, rate: SuccessRate, style: str | None = None) -> None:
    if rate.num_episodes:
        ends = f"{100 * rate.interval.low:.1f} - {100 * rate.interval.high:.1f}"
        cells = (rate.mode, dimension, level, f"{100 * rate.rate:.1f} %", ends, rate.num_episodes, rate.num_states)
        table.add_row(*map(str, cells), style=style, end_section=bool(style))
