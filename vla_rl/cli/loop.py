"""Commands of many runs: the closed loop, its demonstration, the ablation with negative controls, and the sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vla_rl.cli.options import (
    PROGRAM,
    JobCpus,
    JobGpus,
    Output,
    Overrides,
    OwnRecipe,
    RayAddress,
    RecipeName,
    Resume,
    stopped,
)
from vla_rl.cli.running import cluster_of, load, run
from vla_rl.common.errors import ConfigError
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.task_names import print_table
from vla_rl.recipe.checks import TRAIN
from vla_rl.workflows.ablate import ablate as run_ablation
from vla_rl.workflows.demo import demo as run_demo
from vla_rl.workflows.sweep import RESULT_FILE
from vla_rl.workflows.sweep import sweep as run_sweep

app = typer.Typer()


@app.command()
def ablate(
    recipe: RecipeName,
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of the recipe and of each control; at least 3 to claim.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    ray: RayAddress = None,
    job_cpus: JobCpus = 1,
    job_gpus: JobGpus = 0.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of all runs, by default runs/NAME-ablation; goes on.")
    ] = None,
) -> None:
    """Is the gain due to RL? The recipe and its negative controls, several seeds each, in one table."""
    loaded = load(recipe, overrides, TRAIN)
    folder = output or Path("runs") / f"{loaded.name}-ablation"
    own = range(loaded.seed, loaded.seed + seeds)
    cluster = cluster_of(ray, job_cpus, job_gpus)
    try:
        result = run_ablation(
            recipe, loaded, overrides or [], folder, seeds=own, jobs=jobs, cluster=cluster, program=PROGRAM
        )
    except KeyboardInterrupt:
        raise stopped(f"Finished runs are kept in {folder}; the same command resumes there.") from None
    print_table(result.table())
    typer.echo(f"written: {RunFolder(folder).ablation}")


@app.command()
def demo(
    overrides: Overrides = None,
    output: Output = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Policy and (weaker) world model anew.")] = False,
) -> None:
    """The whole loop on the built-in tabletop: real episodes, world model, RL in imagination, the truth, a report."""
    typer.echo(f"report: {run_demo(overrides or [], output, from_scratch, program=PROGRAM)}")


@app.command()
def loop(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Real episodes, a world model fitted on them, its trust, RL in imagination, and the truth."""
    from vla_rl.workflows.loop.closed_loop import loop_run

    run(loop_run(PROGRAM), recipe, overrides, output, resume)


@app.command()
def sweep(
    recipe: RecipeName,
    overrides: Overrides = None,
    over: Annotated[
        list[str] | None, typer.Option(help="An option and its values: algo.optim.lr=1e-4,3e-4; repeat it.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    ray: RayAddress = None,
    job_cpus: JobCpus = 1,
    job_gpus: JobGpus = 0.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of all runs, by default runs/NAME-sweep; goes on.")
    ] = None,
) -> None:
    """Train with every combination of some options' values, and put the runs' success into one table."""
    if not over:
        raise ConfigError(
            "--over: none given; name an option and its values, for example --over algo.optim.lr=1e-4,3e-4"
        )
    folder = output or Path("runs") / f"{load(recipe, overrides, TRAIN).name}-sweep"
    cluster = cluster_of(ray, job_cpus, job_gpus)
    try:
        result = run_sweep(recipe, overrides or [], over, folder, jobs=jobs, cluster=cluster, program=PROGRAM)
    except KeyboardInterrupt:
        raise stopped(f"Finished runs are kept in {folder}; the same command resumes there.") from None
    Console().print(result.table())
    typer.echo(f"written: {folder / RESULT_FILE}")
