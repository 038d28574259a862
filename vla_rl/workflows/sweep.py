"""Many runs in one table: every combination of some options' values, or a recipe against its negative controls.

    vla-rl sweep tabletop_grpo --over algo.optim.lr=1e-4,3e-4 --over seed=0,1,2

Runs are evaluated on the `validation` split: the best of many, chosen on the states of the claim, would flatter it.

    vla-rl sweep tabletop_grpo --controls 3

runs, for each seed, the recipe as it is, with advantages permuted over all trajectories
(`train.control=shuffled_rewards`), and with as many behavior-cloning updates instead
(`train.control=continue_bc`). All start from the same policy and end with the same evaluation.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import rich
from pydantic import Field
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import console_table
from vla_rl.config import Config, ConfigError, Number
from vla_rl.data.hub import check_datasets
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.statistics import SEEDS_ALIKE, Interval, summarize_seeds
from vla_rl.recipe.recipe import Recipe, TrainRecipe, load_recipe
from vla_rl.workflows.jobs import FINAL, Cluster, Job, job, run_jobs

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


ARMS = ("none", "shuffled_rewards", "continue_bc")
LABELS = {
    "none": "RL",
    "shuffled_rewards": "shuffled rewards",
    "continue_bc": "behavior cloning continued",
    "online_grpo": "RL in the simulator, as many real episodes",
}


class Gain(Config):
    """A difference of success rates over seeds, in fractions.

    Attributes:
        of, over: what is compared: an arm's label, or "base".
        mode: "greedy" or "sampled".
        mean: over seeds; per_seed: each seed's. interval: 95 %, of a new seed on new initial states, by
            `summarize_seeds` (with fewer than three seeds: NaN).
        p_values: exact, of each seed, with all samples of a state flipped together.
    """

    of: str
    over: str
    mode: str
    mean: Number
    per_seed: tuple[Number, ...]
    interval: Interval
    p_values: tuple[float, ...]


class Ablation(Config):
    """The outcome of `ablate`.

    Attributes:
        rates: arm label (or "base") -> mode -> success rate of each seed (one for base).
        num_episodes: evaluated per seed and mode.
    """

    recipe: str
    seeds: tuple[int, ...]
    num_episodes: int
    rates: dict[str, dict[str, tuple[Number, ...]]]
    gains: tuple[Gain, ...] = Field(description="Of RL over base and each control, and of each control over base.")

    def table(self) -> Table:
        """For the console."""
        title = f"{self.recipe}: {len(self.seeds)} seeds, n = {self.num_episodes} each"
        head = ("mode", "difference", "points", "95 % interval", "by seed", "exact p by seed")
        table = console_table(title, head, head, SEEDS_ALIKE)
        for g in self.gains:
            low, high = (f"{100 * end:+.1f}" for end in g.interval)
            table.add_row(
                g.mode,
                f"{g.of} - {g.over}",
                f"{100 * g.mean:+.1f}",
                "needs 3 seeds" if math.isnan(g.interval.low) else f"{low} to {high}",
                "  ".join(f"{100 * d:+.1f}" for d in g.per_seed),
                "  ".join(f"{p:.1g}" for p in g.p_values),
                style="bold" if g.of == LABELS["none"] else None,
            )
        return table


def ablate(
    recipe_name: str,
    recipe: TrainRecipe,
    overrides: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str],
    seeds: Sequence[int],
    arms: Sequence[str] = ARMS,
    jobs: int = 2,
    cluster: Cluster | None = None,
) -> Ablation:
    """Run all arms and seeds, each as a `vla-rl train` of its own, and compare their evaluations.

    Runs that are already finished in `folder` are not repeated; unfinished ones resume.

    Args:
        recipe_name, overrides: as on the command line; handed to each run.
        program: how `vla-rl` is started. jobs: runs side by side, each with its share of the cores.
        cluster: whose machines run them in place of this one.

    Raises:
        ConfigError: no seeds, an unknown arm, or `folder` holds runs of another recipe.
        DatasetError: the control continue_bc has yet to run, and its demonstrations are not there.
        RuntimeError: a run failed; its log is named.
    """
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or "none" not in arms or not seeds:
        raise ConfigError(f"ablate: arms {list(arms)}, seeds {list(seeds)}; arms are {list(ARMS)}, 'none' among them")
    if "continue_bc" in arms and recipe.sft is None:
        raise ConfigError(
            "sft: this recipe has none, but the control continue_bc learns from demonstrations: "
            "name them in sft.datasets"
        )
    runs = {arm: [RunFolder(folder / f"{arm}-seed{seed}") for seed in seeds] for arm in ("continue_bc", *arms)}
    controls = [run.evaluation(FINAL) for run in runs["continue_bc"]]
    if "continue_bc" in arms and recipe.sft is not None and not all(file.is_file() for file in controls):
        check_datasets(dataset.path for dataset in recipe.sft.datasets)
    folder.mkdir(parents=True, exist_ok=True)
    base = job("eval", recipe_name, [*overrides, "num_threads=0"], folder / "base")
    all_jobs = [base]
    for number, seed in enumerate(seeds):
        for arm in arms:
            own = [f"seed={seed}", f"train.control={arm}", "train.evaluate=after", "num_threads=0"]
            all_jobs.append(job("train", recipe_name, [*overrides, *own], runs[arm][number].path))
    rich.print(f"{len(all_jobs)} runs, {jobs} side by side; each writes its output to a .log in {folder}")
    run_jobs(all_jobs, jobs, program, rich.print, cluster)
    evaluations = {arm: [Evaluation.load(run.evaluation(FINAL)) for run in runs[arm]] for arm in arms}
    result = summarize(recipe.name, Evaluation.load(base.result), evaluations, tuple(seeds))
    write_text_atomic(RunFolder(folder).ablation, result.model_dump_json(indent=1) + "\n")
    return result


def summarize(
    name: str, base: Evaluation, evaluations: dict[str, list[Evaluation]], seeds: tuple[int, ...]
) -> Ablation:
    """The table's numbers from finished evaluations: base once, each arm once per seed, same initial states."""
    gains = []
    for mode in base.modes:
        rl = evaluations["none"]
        gains.append(gain_of(LABELS["none"], "base", mode, rl, [base] * len(seeds)))
        for arm, runs in evaluations.items():
            if arm != "none":
                gains.append(gain_of(LABELS["none"], LABELS[arm], mode, rl, runs))
        for arm, runs in evaluations.items():
            if arm != "none":
                gains.append(gain_of(LABELS[arm], "base", mode, runs, [base] * len(seeds)))
    rates: dict[str, dict[str, tuple[float, ...]]] = {"base": {m: (base.rate(m).rate,) for m in base.modes}}
    for arm, runs in evaluations.items():
        rates[LABELS[arm]] = {mode: tuple(run.rate(mode).rate for run in runs) for mode in base.modes}
    num_episodes = len([e for e in base.select(base.modes[-1]) if not e.lost])
    return Ablation(recipe=name, seeds=seeds, num_episodes=num_episodes, rates=rates, gains=tuple(gains))


def gain_of(of: str, over: str, mode: str, after: Sequence[Evaluation], before: Sequence[Evaluation]) -> Gain:
    """The difference of two evaluations of each seed, in order, on the same initial states."""
    pairs = list(zip(before, after, strict=True))
    states = sorted({(e.task, e.index) for e in before[0].select(mode)})
    differences = np.array([_by_state(b, mode, states) - _by_state(a, mode, states) for a, b in pairs])
    summary = summarize_seeds(differences)
    p_values = tuple(compare(a, b).result(mode).p_value_by_state for a, b in pairs)
    return Gain(
        of=of,
        over=over,
        mode=mode,
        mean=summary.mean,
        per_seed=summary.per_seed,
        interval=summary.interval,
        p_values=p_values,
    )


def _by_state(evaluation: Evaluation, mode: str, states: Sequence[tuple[str, int]]) -> np.ndarray:
    """float (states,): success of each state, averaged over its samples; NaN where all were lost."""
    sums: dict[tuple[str, int], list[bool]] = {}
    for episode in evaluation.select(mode):
        if not episode.lost:
            sums.setdefault((episode.task, episode.index), []).append(episode.success)
    return np.array([np.mean(sums[s]) if s in sums else np.nan for s in states])
