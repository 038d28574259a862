"""Commands of many runs: the demonstration, the closed loop, the sweep and the negative controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import print_table
from vla_rl.recipe.recipe import TRAIN
from vla_rl.workflows.demo import demo as run_demo
from vla_rl.workflows.sweep import RESULT_FILE, ablate
from vla_rl.workflows.sweep import sweep as run_sweep

app = typer.Typer()


@app.command()
def demo(
    overrides: Overrides = None,
    output: Output = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Policy and (weaker) world model anew.")] = False,
    libero: Annotated[bool, typer.Option("--libero", help="On a task of LIBERO, which `make setup-dev` adds.")] = False,
) -> None:
    """The whole loop on the built-in tabletop: real episodes, world model, RL in imagination, the truth, a report."""
    typer.echo(f"report: {run_demo(overrides or [], output, from_scratch, libero, program=PROGRAM)}")
    recipe = ("libero_object_grpo", "policy.path=pretrained:libero_object_base") if libero else ("tabletop_grpo",)
    typer.echo(next_command("train", *recipe, "--output", "runs/first", what="GRPO in the simulator itself"))


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
    controls: Annotated[
        int | None,
        typer.Option(min=1, metavar="SEEDS", help="Negative controls, so many seeds of each; at least 3 to claim."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    ray: RayAddress = None,
    job_cpus: JobCpus = 1,
    job_gpus: JobGpus = 0.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of all runs, by default runs/NAME-sweep or -ablation; goes on."),
    ] = None,
) -> None:
    """Train many runs of a recipe, and put their success into one table.

    With --over every combination of some options' values. With --controls the recipe and its negative controls: is the
    gain due to RL?
    """
    if (controls is None) == (not over):
        raise ConfigError(
            "sweep: give either --over OPTION=VALUES, such as --over algo.optim.lr=1e-4,3e-4, or --controls 3"
        )
    loaded, cluster = load(recipe, overrides, TRAIN), cluster_of(ray, job_cpus, job_gpus)
    folder = output or Path("runs") / f"{loaded.name}-{'ablation' if controls else 'sweep'}"
    try:
        if controls:
            own, file = range(loaded.seed, loaded.seed + controls), RunFolder(folder).ablation
            result = ablate(
                recipe, loaded, overrides or [], folder, seeds=own, jobs=jobs, cluster=cluster, program=PROGRAM
            )
        else:
            file = folder / RESULT_FILE
            result = run_sweep(recipe, overrides or [], over or (), folder, jobs=jobs, cluster=cluster, program=PROGRAM)
    except KeyboardInterrupt:
        raise stopped(f"Finished runs are kept in {folder}; the same command resumes there.") from None
    print_table(result.table())
    typer.echo(f"written: {file}")
