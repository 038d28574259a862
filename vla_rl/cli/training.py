"""Commands that train a policy, and make what it learns from: `train`, `sft`, `offline`, `online`, `collect`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vla_rl.cli.options import (
    Output,
    Overrides,
    OwnRecipe,
    RecipeName,
    Resume,
    check_writable,
    load,
    load_run,
    resumable,
    say,
    stopped,
)

if TYPE_CHECKING:
    from vla_rl.distributed.process_group import ProcessGroup
    from vla_rl.recipe.recipe import Recipe


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(train)
    app.command()(sft)
    app.command()(offline)
    app.command()(online)
    app.command()(collect)


def joined(recipe: Recipe) -> AbstractContextManager[ProcessGroup]:
    """Join the processes that a launcher started, for a block; without a launcher: this process alone.

    Raises:
        ConfigError: the recipe has what does not work in several processes.
    """
    from vla_rl.distributed.process_group import ALONE, num_launched

    if num_launched() == 1:
        return nullcontext(ALONE)
    from vla_rl.distributed.launched import launched_group

    return launched_group(recipe)


def train(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy by reinforcement learning."""
    from vla_rl.common.run_folder import RunFolder, open_run
    from vla_rl.recipe.checks import TRAIN
    from vla_rl.recipe.pinned import pinned_demonstrations
    from vla_rl.training.train import train as run_training

    loaded = pinned_demonstrations(load_run(recipe, overrides, output, resume, TRAIN), say)
    with joined(loaded) as world:
        folder = Path(
            world.broadcast_from_main(lambda: str(open_run(loaded, output, resume, free=("train.iterations",))))
        )
        with resumable("train", folder):
            policy = run_training(loaded, folder, resume)
        if world.is_main:
            typer.echo(f"policy: {policy}\nreport: {RunFolder(folder).report}")


def sft(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.recipe.checks import SFT
    from vla_rl.recipe.pinned import pinned
    from vla_rl.workflows.clone import clone

    loaded, longer = load_run(recipe, overrides, output, resume, SFT), ("sft.steps",)
    loaded = pinned(loaded, say, "sft.datasets")
    with joined(loaded) as world:
        folder = Path(world.broadcast_from_main(lambda: str(open_run(loaded, output, resume, free=longer))))
        with resumable("sft", folder):
            summary = clone(loaded, folder)
    if not world.is_main:
        return
    loss = f", loss {summary['loss']:.4f}" if "loss" in summary else ""
    typer.echo(f"policy: {summary['policy']}  ({summary['steps']} steps{loss})")


def offline(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from logged episodes alone, without an environment: successes and failures both teach."""
    from vla_rl.common.run_folder import RunFolder, open_run
    from vla_rl.recipe.checks import OFFLINE
    from vla_rl.recipe.pinned import pinned
    from vla_rl.workflows.offline import improve_offline

    loaded = pinned(load_run(recipe, overrides, output, resume, OFFLINE), say, "sft.datasets")
    folder = open_run(loaded, output, resume)
    with resumable("offline", folder):
        summary = improve_offline(loaded, folder, say)
    typer.echo(f"policy: {summary['policy']}  ({summary['steps']} steps)\nreport: {RunFolder(folder).report}")


def online(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from every episode that it runs, and those logged before, by a critic; the policy is frozen."""
    from vla_rl.common.run_folder import RunFolder, open_run
    from vla_rl.recipe.checks import ONLINE
    from vla_rl.recipe.pinned import pinned
    from vla_rl.workflows.online import improve_online

    loaded = pinned(load_run(recipe, overrides, output, resume, ONLINE), say, "sft.datasets")
    folder = open_run(loaded, output, resume)
    with resumable("online", folder):
        improve_online(loaded, folder, say)
    typer.echo(f"policy: {RunFolder(folder).policy}\nreport: {RunFolder(folder).report}")


def collect(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The dataset's folder (collect.dataset).")
    ] = None,
) -> None:
    """Write a LeRobotDataset: the scripted expert's demonstrations, or a policy's episodes."""
    from vla_rl.recipe.checks import COLLECT
    from vla_rl.rollout.recording_plan import CollectConfig
    from vla_rl.workflows.collect import collect as run_collect

    check_writable(output)
    loaded = load(recipe, [*(overrides or ()), *([f"collect.dataset={output}"] if output else [])], COLLECT)
    config = loaded.collect or CollectConfig.model_validate({})
    try:
        summary = run_collect(loaded, config, say)
    except KeyboardInterrupt:
        raise stopped("Finished episodes are kept; the same command resumes there.") from None
    typer.echo(f"dataset: {summary['dataset']}  ({summary['episodes']} episodes, {summary['frames']} frames)")
    for task, rate in summary["success_rate"].items():
        typer.echo(f"  {task}: {100 * rate:.0f} % success")
