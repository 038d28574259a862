"""Paired comparison of two policies on the same initial states.

    comparison = compare(Evaluation.load("base.json"), Evaluation.load("final.json"))
    print(comparison.text())

`vla_rl.evaluation.sequential_compare` runs both policies and stops as soon as the answer is clear.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.saved import Saved
from vla_rl.common.tables import console_table
from vla_rl.config import Config
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationError
from vla_rl.evaluation.statistics import (
    Interval,
    clustered_sign_test,
    clustered_wilson_interval,
    paired_bootstrap_interval,
)
from vla_rl.types import Split

# Options of an environment that say how it was run and not what was run.
_HOW_RUN = {
    *("num_envs", "num_workers", "render_devices", "step_timeout"),
    *("num_hosts", "hosts", "token_file", "devices", "assets_path"),
    *("tasks", "cameras", "image_size", "steps_after_success"),
}


class PairedResult(Config):
    """Both policies on the same episodes of one mode, for one task or all together; or, `apart`, each on its own.

    Attributes:
        mode: "greedy", "sampled", ...  task: None for all tasks together.
        num_pairs: episodes of each. num_states: distinct initial states among them.
        rate_a, rate_b: success rates, with 95 % intervals.
        apart: where nothing pairs, the episodes of each; then num_pairs, gained and lost are 0, the difference's
            interval is Newcombe's and the p-value Fisher's.
        gained: solved by b alone. lost: by a alone.
        difference: rate_b - rate_a. bootstrap: its 95 % interval, states resampled within tasks.
        p_value_by_state: exact, with all samples of a state flipped together; McNemar's when each state has one sample.
    """

    mode: str
    task: str | None
    num_pairs: int
    num_states: int
    apart: tuple[int, int] | None = None
    rate_a: float
    interval_a: Interval
    rate_b: float
    interval_b: Interval
    gained: int
    lost: int
    difference: float
    bootstrap: Interval
    p_value_by_state: float

    @property
    def p_name(self) -> str:
        """What `p_value_by_state` is called."""
        return "Fisher p" if self.apart else "p by state" if self.num_states < self.num_pairs else "McNemar p"

    @property
    def counts(self) -> str:
        """ "12 gained, 3 lost of 50", or where nothing pairs the episodes of each."""
        if self.apart:
            return f"{self.apart[0]} and {self.apart[1]} episodes, not paired"
        return f"{self.gained} gained, {self.lost} lost of {self.num_pairs}"

    def text(self, label: str = "") -> str:
        """One line for people, in percentage points; `label` is what the task is called."""
        return (
            f"{self.mode}, {label or self.task or 'all tasks'}: "
            f"{100 * self.rate_a:.1f} % -> {100 * self.rate_b:.1f} %, "
            f"{100 * self.difference:+.1f} points {self.bootstrap.percent('+')}, "
            f"{self.counts}, {self.p_name} {format_p(self.p_value_by_state)}"
        )


class Comparison(Saved):
    """What changed from a to b, and what to know before believing it (`warnings`).

    Attributes:
        env: what headings call the environment. labels: task -> what tables call it; empty: by its name.
        population: which initial states the claim is about; empty: not known.
    """

    WHAT = "comparison"
    ERROR = EvaluationError
    AGAIN = "Compare again with `vla-rl compare`."
    FOR_READERS = ("verdicts",)
    name_a: str
    name_b: str
    policy_a: str | None
    policy_b: str | None
    env: str
    split: Split
    results: tuple[PairedResult, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    population: str = ""
    warnings: tuple[str, ...] = ()

    def result(self, mode: str, task: str | None = None) -> PairedResult:
        """The result of a mode, for one task or all.

        Raises:
            EvaluationError: nothing was paired there.
        """
        for result in self.results:
            if (result.mode, result.task) == (mode, task):
                return result
        known = sorted({r.mode for r in self.results})
        raise EvaluationError(f"nothing compared for mode {mode!r}, task {task!r}; modes: {', '.join(known)}")

    def label(self, result: PairedResult) -> str:
        """What a result's task is called; empty for all together."""
        return self.labels.get(result.task, result.task) if result.task else ""

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(r.mode for r in self.results))

    @property
    def p_name(self) -> str:
        """What the results' `p_value_by_state` are called, in a table's head."""
        return max((r.p_name for r in self.results), key=("McNemar p", "p by state", "Fisher p").index)

    def text(self) -> str:
        """A line per mode and task, then which states the claim is about, then the warnings."""
        population = [self.population] if self.population else []
        lines = [r.text(self.label(r)) for r in self.results]
        return "\n".join([*lines, *population, *(f"warning: {w}" for w in self.warnings)])

    def table(self) -> Table:
        """A table for the console, 80 columns wide; with several samples a state, its p-value is the one by state."""
        title = f"{self.name_a} (a) against {self.name_b} (b) on {self.env}, {self.split} split"
        head = ("task", "a %", "b %", "b - a, 95 % interval", "+ / -", "pairs", self.p_name)
        table = console_table(title, head, ("task",), self.population)
        table.columns[0].min_width = 12
        for r in self.results:
            table.add_row(
                self.label(r) or f"{r.mode}, all",
                f"{100 * r.rate_a:.1f}",
                f"{100 * r.rate_b:.1f}",
                f"{100 * r.difference:+.1f} {r.bootstrap.percent('+')}",
                "–" if r.apart else f"{r.gained} / {r.lost}",
                f"{r.apart[0]}, {r.apart[1]}" if r.apart else str(r.num_pairs),
                format_p(r.p_value_by_state),
                style="bold" if r.task is None else None,
                end_section=r.task is None,
            )
        return table

    def save(self, path: Path, verdicts: Sequence[Config] = ()) -> None:
        """Write JSON, atomically; with what was said of each mode."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        values = self.model_dump(mode="json") | {"verdicts": [said.model_dump(mode="json") for said in verdicts]}
        write_text_atomic(Path(path), json.dumps(values, indent=1) + "\n")


def format_p(p: float) -> str:
    """ "0.0215", "3.1e-07"."""
    return f"{p:.2g}" if p < 0.001 else f"{p:.3g}" if p < 0.1 else f"{p:.2f}"


def compare(a: Evaluation, b: Evaluation, seed: int = 0) -> Comparison:
    """Compare two evaluations on the initial states (and samples) that both hold.

    Args:
        seed: of the bootstrap.

    Raises:
        EvaluationError: other environments or splits, no common mode, or no common initial state.
    """
    for field in ("env", "split"):
        value_a, value_b = getattr(a.meta, field), getattr(b.meta, field)
        if value_a != value_b:
            raise EvaluationError(
                f"cannot compare: {a.meta.name!r} was evaluated on {field} {value_a!r}, {b.meta.name!r} on "
                f"{value_b!r}. Evaluate both with the same recipe."
            )
    modes = [mode for mode in a.modes if mode in b.modes]
    if not modes:
        raise EvaluationError(f"cannot compare: no common mode; a has {a.modes}, b has {b.modes}")
    warnings = _differences_in_making(a, b)
    results: list[PairedResult] = []
    for mode in modes:
        pairs = _pair(a, b, mode, warnings)
        tasks = list(dict.fromkeys(first.task for first, _ in pairs))
        for task in [*tasks, None]:
            chosen = [p for p in pairs if task in (None, p[0].task)]
            results.append(_paired_result(mode, task, chosen, seed))
        warnings.extend(_no_width(results[-1]))
    return Comparison(
        name_a=a.meta.name,
        name_b=b.meta.name,
        policy_a=a.meta.policy,
        policy_b=b.meta.policy,
        env=a.meta.env_title,
        labels=a.labels | b.labels,
        split=a.meta.split,
        results=tuple(results),
        population=_population(a, b, results),
        warnings=tuple(warnings),
    )


def _population(a: Evaluation, b: Evaluation, results: Sequence[PairedResult]) -> str:
    """Return which initial states the claim is about: a benchmark's official ones, or all that could have been drawn.

    With official states the intervals, made by resampling states, are wide rather than narrow for these states alone.
    """
    whole = max((r for r in results if r.task is None), key=lambda r: r.num_pairs)
    samples = whole.num_pairs / whole.num_states
    repeated = f", {samples:.3g} samples of each" if samples > 1 else ""
    recorded = (a.meta.official_states, b.meta.official_states)
    if any(recorded):
        claim = f"official initial states{repeated}: a claim about these states, not the task's distribution of states"
    elif None in recorded:
        claim = f"initial states{repeated}: a claim about these states, and about their distribution if drawn at random"
    else:
        claim = f"initial states{repeated}, drawn at random: a claim about the distribution that they were drawn from"
    return f"{whole.num_states} {claim}"


def _pair(a: Evaluation, b: Evaluation, mode: str, warnings: list[str]) -> list[tuple[EpisodeRecord, EpisodeRecord]]:
    """Episodes of the same task, state and sample, lost ones left out; appends to `warnings` what did not pair."""

    def by_state(evaluation: Evaluation) -> dict[tuple[str, int, int], EpisodeRecord]:
        return {(e.task, e.index, e.sample): e for e in evaluation.select(mode) if not e.lost}

    first, second = by_state(a), by_state(b)
    common = [key for key in first if key in second]
    if not common:
        raise EvaluationError(
            f"cannot compare: in mode {mode!r} no initial state is common to both. "
            f"a: {_describe(first)}; b: {_describe(second)}. Evaluate both with the same tasks and start_index."
        )
    left_out = len(first) + len(second) - 2 * len(common)
    if left_out:
        warnings.append(
            f"{mode}: {len(common)} episodes pair; {len(first) - len(common)} of a and "
            f"{len(second) - len(common)} of b have no counterpart and are left out"
        )
    num_lost = sum(e.lost for e in (*a.select(mode), *b.select(mode)))
    if num_lost:
        warnings.append(f"{mode}: {num_lost} episodes were lost with their worker and are left out")
    return [(first[key], second[key]) for key in common]


def _describe(episodes: dict[tuple[str, int, int], EpisodeRecord]) -> str:
    if not episodes:
        return "no episodes"
    indices = [index for _, index, _ in episodes]
    tasks = sorted({task for task, _, _ in episodes})
    return f"states {min(indices)} to {max(indices)} of {', '.join(tasks)}"


def _differences_in_making(a: Evaluation, b: Evaluation) -> list[str]:
    """What makes a pair unlike in more than the policy."""
    warnings = []
    for mode in a.modes:
        t_a, t_b = (evaluation.meta.temperatures.get(mode) for evaluation in (a, b))
        if None not in (t_a, t_b) and t_a != t_b:
            warnings.append(f"{mode}: drawn at temperature {t_a:g} in a, {t_b:g} in b")
    for task, horizon in a.meta.horizon.items():
        other = b.meta.horizon.get(task, horizon)
        if other != horizon:
            warnings.append(f"{task}: horizon is {horizon} steps in a, {other} in b")
    if a.meta.policy_hash is not None and a.meta.policy_hash == b.meta.policy_hash:
        warnings.append("both evaluations are of the same weights")
    config_a, config_b = a.meta.env_config, b.meta.env_config
    if config_a is not None and config_b is not None:
        changed = [k for k in config_a if k not in _HOW_RUN and config_a[k] != config_b.get(k)]
        warnings.extend(f"env.{key} is {config_a[key]!r} in a, {config_b.get(key)!r} in b" for key in changed)
    return warnings


def _no_width(whole: PairedResult) -> list[str]:
    """Warn of an interval without width: resampling cannot show what none of the states showed."""
    if whole.bootstrap.low != whole.bootstrap.high:
        return []
    unseen = 1 - 0.05 ** (1 / whole.num_states)  # Clopper and Pearson's one-sided 95 % limit for 0 of n.
    return [
        f"{whole.mode}: the difference's interval has no width, since the {whole.num_states} states (within each task) "
        f"agree; up to {100 * unseen:.2g} % of all states may be otherwise (95 %). Evaluate more states."
    ]


def _paired_result(
    mode: str, task: str | None, pairs: list[tuple[EpisodeRecord, EpisodeRecord]], seed: int
) -> PairedResult:
    outcome_a = np.array([x.success for x, _ in pairs])
    outcome_b = np.array([y.success for _, y in pairs])
    tasks = np.array([x.task for x, _ in pairs])
    _, states = np.unique([f"{x.task}/{x.index}" for x, _ in pairs], return_inverse=True)
    gained, lost = int((outcome_b & ~outcome_a).sum()), int((outcome_a & ~outcome_b).sum())
    by_state = np.bincount(states, weights=outcome_b.astype(int) - outcome_a.astype(int)).round().astype(int)
    return PairedResult(
        mode=mode,
        task=task,
        num_pairs=len(pairs),
        num_states=int(states.max()) + 1,
        rate_a=float(outcome_a.mean()),
        interval_a=clustered_wilson_interval(outcome_a, states, tasks),
        rate_b=float(outcome_b.mean()),
        interval_b=clustered_wilson_interval(outcome_b, states, tasks),
        gained=gained,
        lost=lost,
        difference=(gained - lost) / len(pairs),
        bootstrap=paired_bootstrap_interval(outcome_a, outcome_b, clusters=states, strata=tasks, seed=seed),
        p_value_by_state=clustered_sign_test(by_state),
    )
