"""Study of which trust figure predicts the gain of RL, in world models of graded quality.

    python scripts/trust_study.py tabletop_imagination --world-model A --world-model B ... --task push_to_zone

For each task: held-out real episodes of the recipe's policy, each world model's trust figures on them, and RL in each
world model, whatever trust says and without a gate, evaluated in the simulator. Then the rank correlation of each
figure with the real gain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import Field

from vla_rl.cli.options import PROGRAM, JobCpus, JobGpus, Overrides, RayAddress, RecipeName
from vla_rl.cli.running import cluster_of
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config, ConfigError
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.statistics import Interval, spearman
from vla_rl.interfaces import TrustError
from vla_rl.recipe.checks import STUDY
from vla_rl.recipe.recipe import check, load_recipe
from vla_rl.workflows.imagination.measure_trust import measure_world_model
from vla_rl.workflows.jobs import Cluster, job, run_jobs
from vla_rl.workflows.loop.closed_loop import collect_real
from vla_rl.workflows.loop.rounds import HELD_OUT_START
from vla_rl.workflows.recipe_parts import imagining
from world_model.trust.report import PAGE_FILE, TRUST_FILE, TrustReport

MIN_WORLD_MODELS = 4  # With three, a rank correlation is 1, .5, -.5 or -1.
NUM_RESAMPLES = 5000
RESULT, TABLE = "study.json", "study.md"
WORLD_MODELS = "world_models.json"  # whose runs the numbered folders are


class Correlation(Config):
    """Of a trust figure with the real gain, over world models.

    Attributes:
        mode: "greedy" or "sampled", of the evaluation that says what was gained.
        mean: Spearman's rank correlation, averaged over tasks. by_task: of each.
        interval: 95 %, bootstrap over world models.
    """

    figure: str
    mode: str
    mean: float
    by_task: tuple[float, ...]
    interval: Interval


class Study(Config):
    """The outcome of `study`.

    Attributes:
        figures: task -> trust figure -> its value for each world model; those that any of them lacks are left out.
        base: task -> mode -> success before. gains: task -> mode -> success after minus before, of each world model.
        num_episodes: evaluated per task and mode.
    """

    world_models: tuple[str, ...]
    tasks: tuple[str, ...]
    figures: dict[str, dict[str, tuple[float, ...]]]
    base: dict[str, dict[str, float]]
    gains: dict[str, dict[str, tuple[float, ...]]]
    num_episodes: int
    correlations: tuple[Correlation, ...] = Field(default=(), description="Strongest first.")

    def markdown(self) -> str:
        """Two tables: correlations, and what each world model gave."""
        names = ", ".join(self.tasks)
        lines = [
            f"Rank correlation of each trust figure with the real gain of RL, over {len(self.world_models)} world "
            f"models; mean of {len(self.tasks)} tasks ({names}), n = {self.num_episodes} a task and mode.",
            "",
            "| figure | gain | Spearman [95 %] | by task |",
            "|---|---|---|---|",
        ]
        for c in self.correlations:
            by_task = ", ".join(f"{value:+.2f}" for value in c.by_task)
            low, high = c.interval
            lines.append(f"| {c.figure} | {c.mode} | {c.mean:+.2f} [{low:+.2f}, {high:+.2f}] | {by_task} |")
        modes = list(self.base[self.tasks[0]])
        heads = [f"{task}, {mode}" for task in self.tasks for mode in modes]
        lines += ["", f"| world model | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
        base = [f"{100 * self.base[task][mode]:.1f} %" for task in self.tasks for mode in modes]
        lines.append(f"| - (before) | {' | '.join(base)} |")
        for number, name in enumerate(self.world_models):
            gains = [f"{100 * self.gains[task][mode][number]:+.1f}" for task in self.tasks for mode in modes]
            lines.append(f"| {name} | {' | '.join(gains)} |")
        return "\n".join(lines) + "\n"


def study(
    recipe_name: str,
    overrides: Sequence[str],
    world_models: Sequence[str],
    tasks: Sequence[str],
    folder: Path,
    *,
    program: Sequence[str],
    jobs: int = 2,
    cluster: Cluster | None = None,
    show: Callable[[str], None] = print,
) -> Study:
    """Measure, train and evaluate; writes `folder`/study.json and study.md. What is finished there is not repeated.

    Args:
        recipe_name, overrides: as on the command line; an env of kind world_model, and real_env.
        world_models: folders, or pretrained:NAME. tasks: each is studied by itself.
        program: how `vla-rl` is started.
        jobs: RL runs side by side, each with its share of the cores.
        cluster: whose machines run them in place of this one.

    Raises:
        ConfigError: too few world models, one given twice, no task, or `folder` holds runs of another recipe or in
            other world models.
        RuntimeError: a run failed; its log is named.
    """
    if len(world_models) < MIN_WORLD_MODELS or len(set(world_models)) < len(world_models):
        raise ConfigError(
            f"--world-model: got {', '.join(world_models) or 'none'}; a rank correlation needs {MIN_WORLD_MODELS} at "
            "least, each once (12 or more make it worth something)"
        )
    if not tasks:
        raise ConfigError("--task: got none; name one or more of the environment's tasks")
    _claim(folder, world_models)
    trust: dict[str, list[dict[str, float]]] = {}
    bases, runs = {}, {}
    for task in tasks:
        own = [*overrides, f"env.tasks=[{task}]", f"real_env.tasks=[{task}]"]
        trust[task] = _measure(recipe_name, own, world_models, folder / task, show)
        bases[task] = job("eval", recipe_name, [*own, "num_threads=0"], folder / task / "base")
        alone = ["env.trust.ignore=true", "gate.every=0", "train.evaluate=after", "num_threads=0"]
        alone.append("train.allow_no_success=true")  # Where nothing is imagined to succeed: a gain of none.
        runs[task] = [
            job("train", recipe_name, [*own, *_in_any(recipe_name, own, path), *alone], folder / task / f"rl_{number}")
            for number, path in enumerate(world_models, start=1)
        ]
    run_jobs([each for task in tasks for each in (bases[task], *runs[task])], jobs, program, show, cluster)
    before = {task: Evaluation.load(bases[task].result) for task in tasks}
    after = {task: [Evaluation.load(run.result) for run in runs[task]] for task in tasks}
    modes = before[tasks[0]].modes
    base = {task: {mode: before[task].rate(mode).rate for mode in modes} for task in tasks}
    gains = {
        task: {mode: tuple(each.rate(mode).rate - base[task][mode] for each in after[task]) for mode in modes}
        for task in tasks
    }
    names = [name for name in trust[tasks[0]][0] if all(name in each for task in tasks for each in trust[task])]
    figures = {task: {name: tuple(each[name] for each in trust[task]) for name in names} for task in tasks}
    result = Study(
        world_models=tuple(world_models),
        tasks=tuple(tasks),
        figures=figures,
        base=base,
        gains=gains,
        num_episodes=len([e for e in before[tasks[0]].select(modes[-1]) if not e.lost]),
        correlations=tuple(correlations(figures, gains)),
    )
    write_text_atomic(folder / RESULT, result.model_dump_json(indent=1) + "\n")
    write_text_atomic(folder / TABLE, result.markdown())
    return result


def _in_any(recipe_name: str, overrides: Sequence[str], path: str) -> list[str]:
    """Overrides for RL in a world model whatever trust says, also where it was measured that not one frame holds."""
    chosen = [f"env.path={path}"]
    env = imagining(load_recipe(recipe_name, [*overrides, *chosen, "env.trust.ignore=true"]))
    try:
        env.admitted()
    except TrustError:
        chosen.append(f"env.imagination.horizon={max(env.env_spec().horizon.values())}")
    return chosen


def _claim(folder: Path, world_models: Sequence[str]) -> None:
    """What is in the folder already must be of these world models, in this order."""
    file = folder / WORLD_MODELS
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(list(world_models), indent=1) + "\n")
    elif (found := json.loads(file.read_text(encoding="utf-8"))) != list(world_models):
        raise ConfigError(
            f"--world-model: got {', '.join(world_models)}, but {folder} holds a study of {', '.join(found)}; give "
            "these in this order, or another --output"
        )


def _measure(
    recipe_name: str, overrides: Sequence[str], world_models: Sequence[str], folder: Path, show: Callable[[str], None]
) -> list[dict[str, float]]:
    """Trust figures of each world model on the same held-out episodes of a task."""
    recipe = check(load_recipe(recipe_name, overrides), STUDY)
    held_out = folder / "held_out"
    collect_real(recipe, held_out, recipe.loop.held_out, HELD_OUT_START, show)
    found = []
    for number, path in enumerate(world_models, start=1):
        place = folder / f"trust_{number}"
        if not (place / PAGE_FILE).is_file():
            show(f"{folder.name}: trust in {path}")
            measure_world_model(recipe, Path(path), [held_out], folder=place)
        measured = TrustReport.load(place / TRUST_FILE).figures
        found.append({name: figure.value for name, figure in measured.items() if not math.isnan(figure.value)})
    return found


def correlations(
    figures: Mapping[str, Mapping[str, Sequence[float]]], gains: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[Correlation]:
    """Of every figure that differs between world models, in every task, with every mode's gain; strongest first.

    Args:
        figures, gains: task -> name -> one value for each of W world models.
    """
    tasks = list(gains)
    number = len(next(iter(gains[tasks[0]].values())))
    drawn = np.random.default_rng(0).integers(number, size=(NUM_RESAMPLES, number))
    found = []
    for mode in gains[tasks[0]]:
        for name in figures[tasks[0]]:
            pairs = [(np.array(figures[task][name]), np.array(gains[task][mode])) for task in tasks]
            by_task = [float(spearman(x, y)) for x, y in pairs]
            if any(math.isnan(value) for value in by_task):
                continue
            # A resample in which all are alike has no correlation.
            means = np.mean([spearman(x[drawn], y[drawn]) for x, y in pairs], axis=0)
            low, high = np.nanquantile(means, [0.025, 0.975])
            found.append(
                Correlation(
                    figure=name,
                    mode=mode,
                    mean=float(np.mean(by_task)),
                    by_task=tuple(by_task),
                    interval=Interval(float(low), float(high)),
                )
            )
    return sorted(found, key=lambda one: -abs(one.mean))


def main(
    recipe: RecipeName,
    world_model: Annotated[list[str], typer.Option("--world-model", help="Its folder; 12 or more, good and bad.")],
    task: Annotated[list[str], typer.Option("--task", help="Studied by itself; two or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all runs; goes on.")] = Path("runs/study"),
    jobs: Annotated[int, typer.Option(min=1, help="RL runs side by side.")] = 2,
    ray: RayAddress = None,
    job_cpus: JobCpus = 1,
    job_gpus: JobGpus = 0.0,
    overrides: Overrides = None,
) -> None:
    """Which trust figure predicts what RL gains? RL in many world models, evaluated in the simulator."""
    check(load_recipe(recipe, overrides or ()), STUDY)
    cluster = cluster_of(ray, job_cpus, job_gpus)
    found = study(
        recipe, overrides or (), world_model, task, output, program=PROGRAM, jobs=jobs, cluster=cluster, show=typer.echo
    )
    typer.echo(f"{found.markdown()}\nwritten: {output / TABLE}")


if __name__ == "__main__":
    typer.run(main)
