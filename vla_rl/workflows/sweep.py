"""Sweep: every combination of some options' values, each a run, in one table.

    vla-rl sweep tabletop_grpo --over algo.optim.lr=1e-4,3e-4 --over seed=0,1,2

Runs are evaluated on the `validation` split: the best of many, chosen on the states of the claim, would flatter it.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import rich
from pydantic import Field
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.tables import console_table
from vla_rl.config import Config, ConfigError, Number
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.statistics import Interval
from vla_rl.recipe.recipe import Recipe, load_recipe
from vla_rl.workflows.jobs import Cluster, Job, job, run_jobs

RESULT_FILE = "sweep.json"
SPLIT = "eval.split=validation"
_LONGEST = 180  # characters of a folder's name: file systems take 255 bytes


class SweepRow(Config):
    """One run.

    Attributes:
        values: the combination, as overrides. run: its folder, inside the sweep's.
        num_episodes: of its evaluation, each mode, lost ones excluded.
        rates: mode -> success rate, of all tasks. gains: mode -> [difference to the policy that RL began with, low,
            high], paired by initial state, in fractions.
    """

    values: tuple[str, ...]
    run: str
    num_episodes: int
    rates: dict[str, Number]
    gains: dict[str, tuple[Number, Number, Number]]


class Sweep(Config):
    """The outcome of `sweep`."""

    recipe: str
    rows: tuple[SweepRow, ...] = Field(description="In the order of the options' values.")

    def table(self) -> Table:
        """For the console, best sampled success first."""
        modes = list(dict.fromkeys(mode for row in self.rows for mode in row.rates))
        best, counts = modes[-1], sorted({row.num_episodes for row in self.rows})
        n = f"n = {counts[0]} each" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        head = ["values", *(name for mode in modes for name in (f"{mode} %", "gain, 95 % interval"))]
        note = "The best of several is flattered by the choice: confirm it on the eval split, with further seeds."
        table = console_table(f"{self.recipe}: {len(self.rows)} runs, {n}, validation split", head, ("values",), note)
        for row in sorted(self.rows, key=lambda row: -row.rates.get(best, 0.0)):
            cells = []
            for mode in modes:
                if mode not in row.rates:  # The sweep is over temperatures.
                    cells += ["–", "–"]
                    continue
                points = [100 * value for value in row.gains[mode]]
                cells += [f"{100 * row.rates[mode]:.1f}", f"{points[0]:+.1f} [{points[1]:+.1f}, {points[2]:+.1f}]"]
            table.add_row(" ".join(row.values), *cells)
        return table


def combinations(over: Sequence[str]) -> list[tuple[str, ...]]:
    """Return every combination of `["algo.optim.lr=1e-4,3e-4", "seed=0,1"]` as overrides; not parted within brackets.

    Raises:
        ConfigError: one has no key, or a value is empty.
    """
    axes = []
    for text in over:
        key, equals, raw = text.partition("=")
        values = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", raw)]
        if not key or not equals or not all(values):
            raise ConfigError(f"--over: got {text!r}; give a key and its values, for example algo.optim.lr=1e-4,3e-4")
        if len(set(values)) < len(values):
            raise ConfigError(f"--over: {text!r} names a value twice")
        axes.append([f"{key}={value}" for value in values])
    return list(itertools.product(*axes))


def sweep(
    recipe_name: str,
    overrides: Sequence[str],
    over: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str],
    jobs: int = 2,
    cluster: Cluster | None = None,
    show: Callable[[str], None] = rich.print,
) -> Sweep:
    """Run `vla-rl train` for every combination, side by side, and evaluate each against the policy that it began with.

    Runs that are already finished in `folder` are not repeated; unfinished ones resume.

    Args:
        recipe_name, overrides: as on the command line; handed to each run.
        over: options with their values (see `combinations`).
        program: how `vla-rl` is started. jobs: runs side by side, each with its share of the cores.
        cluster: whose machines run them in place of this one.

    Raises:
        ConfigError: an option or value is wrong (before anything runs), or `folder` holds runs of another recipe.
        RuntimeError: a run failed; its log is named.
    """
    chosen = combinations(over)
    recipes = [load_recipe(recipe_name, [*overrides, *values, SPLIT]) for values in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    bases: dict[str, Job] = {}
    for values, recipe in zip(chosen, recipes, strict=True):
        key = _what_is_evaluated(recipe)
        if key not in bases:
            own = [*overrides, *values, SPLIT, "num_threads=0"]
            bases[key] = job("eval", recipe_name, own, folder / f"base-{len(bases)}")
    runs = []
    for values, name in zip(chosen, folder_names(chosen), strict=True):
        own = [*overrides, *values, SPLIT, "train.evaluate=after", "num_threads=0"]
        runs.append(job("train", recipe_name, own, folder / name))
    show(f"{len(runs)} runs, {jobs} side by side; each writes its output to a .log in {folder}")
    run_jobs([*bases.values(), *runs], jobs, program, show, cluster)
    rows = []
    for values, recipe, run in zip(chosen, recipes, runs, strict=True):
        before, after = Evaluation.load(bases[_what_is_evaluated(recipe)].result), Evaluation.load(run.result)
        rows.append(_row(values, run.folder.name, before, after))
    result = Sweep(recipe=recipes[0].name, rows=tuple(rows))
    write_text_atomic(folder / RESULT_FILE, result.model_dump_json(indent=1) + "\n")
    return result


def _what_is_evaluated(recipe: Recipe) -> str:
    """The policy that RL begins with, and how it is evaluated: runs in which these are the same share one base."""
    parts = {"policy": recipe.policy, "env": recipe.acting_env, "eval": recipe.eval}
    return json.dumps({name: part.model_dump(mode="json") for name, part in parts.items()}, sort_keys=True)


def folder_names(chosen: Sequence[Sequence[str]]) -> list[str]:
    """A folder's name for each combination: what it is, with a number where that is too long, or another's too."""
    names = [re.sub(r"[^\w.=,+-]+", "_", ",".join(values)) for values in chosen]
    numbers = [f"-{zlib.crc32(','.join(values).encode()):08x}" for values in chosen]
    return [
        name[:_LONGEST] + number if len(name) > _LONGEST or names.count(name) > 1 else name
        for name, number in zip(names, numbers, strict=True)
    ]


def _row(values: tuple[str, ...], run: str, before: Evaluation, after: Evaluation) -> SweepRow:
    found = compare(before, after)
    gains: dict[str, tuple[float, float, float]] = {}
    for mode in after.modes:
        result = found.result(mode)
        interval: Interval = result.bootstrap
        gains[mode] = (result.difference, interval.low, interval.high)
    rates = {mode: after.rate(mode) for mode in after.modes}
    return SweepRow(
        values=values,
        run=run,
        num_episodes=rates[after.modes[-1]].num_episodes,
        rates={mode: rate.rate for mode, rate in rates.items()},
        gains=gains,
    )
