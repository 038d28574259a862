"""Commands that train a policy, and make what it learns from: `train`, `sft`, `offline`, `online`, `collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import (
    Output,
    Overrides,
    OwnRecipe,
    RecipeName,
    Resume,
    check_writable,
    load,
    run,
    say,
    stopped,
)


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(train)
    app.command()(sft)
    app.command()(offline)
    app.command()(online)
    app.command()(collect)


def train(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy by reinforcement learning."""
    from vla_rl.workflows.post_train import RUN

    run(RUN, recipe, overrides, output, resume)


def sft(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    from vla_rl.workflows.clone import RUN

    run(RUN, recipe, overrides, output, resume)


def offline(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from logged episodes alone, without an environment: successes and failures both teach."""
    from vla_rl.workflows.offline import RUN

    run(RUN, recipe, overrides, output, resume)


def online(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from every episode that it runs, and those logged before, by a critic; the policy is frozen."""
    from vla_rl.workflows.online import RUN

    run(RUN, recipe, overrides, output, resume)


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
