"""Results over a benchmark's suites, as papers print them: a row a suite, their averages, Markdown and LaTeX.

results = SuiteResults.load("runs/x/suites.json")
print(results.markdown())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config
from vla_rl.evaluation.results import Evaluation, EvaluationError, read_json_document
from vla_rl.evaluation.statistics import Interval, mean_interval

SCHEMA_VERSION = 1


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


class SuiteResults(Config):
    """Every suite of one evaluation, and the averages."""

    schema_version: int = SCHEMA_VERSION
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
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("mode", "suite") else "right", overflow="fold")
        for place, rate in enumerate(self.rates):
            last = place + 1 == len(self.rates) or self.rates[place + 1].mode != rate.mode
            table.add_row(*_cells(rate), style="bold" if rate.is_average else None, end_section=last)
        table.caption, table.caption_justify = "averages weigh each suite alike", "left"
        return table

    def markdown(self) -> str:
        """The table for a page."""
        lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
        return "\n".join([*lines, *(f"| {' | '.join(_cells(rate))} |" for rate in self.rates)]) + "\n"

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
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
        write_text_atomic(path.with_suffix(".md"), self.markdown())
        write_text_atomic(path.with_suffix(".tex"), self.latex())

    @staticmethod
    def load(path: str | Path) -> SuiteResults:
        """Read what `save` wrote.

        Raises:
            EvaluationError: missing, truncated, of another schema, or with invalid fields.
        """
        try:
            return SuiteResults.model_validate(read_json_document(Path(path), "suites", SCHEMA_VERSION))
        except ValidationError as error:
            raise EvaluationError(f"{path}: not usable: {error.errors()[0]['msg']}") from None


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
