"""Ablation: a recipe against its negative controls, each with several seeds, in one table.

    vla-rl sweep tabletop_grpo --controls 3

runs, for each seed, the recipe as it is, with advantages permuted over all trajectories
(`train.control=shuffled_rewards`), and with as many behavior-cloning updates instead
(`train.control=continue_bc`). All start from the same policy and end with the same evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.workflows.jobs import FINAL, Cluster, job, run_jobs

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
