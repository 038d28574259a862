"""Commands of correcting and training again: rac, finish-recording."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(rac)
    app.command(name="finish-recording")(finish_recording)


def rac(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME-DATE-TIME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output, else with the recipe's newest.")
    ] = False,
) -> None:
    """Rounds in a simulator: a policy with a scripted person beside it, then training on what was corrected."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.rac import run_rac

    loaded = load_recipe(recipe, overrides or ())
    folder = open_run(loaded, output, resume)
    run_rac(loaded, folder, typer.echo)
    typer.echo((folder / "rac.md").read_text())
    typer.echo(f"written: {folder / 'rac.json'}")


def finish_recording(
    folder: Annotated[Path, typer.Argument(help="The dataset's folder, as it was given to the recorder.")],
) -> None:
    """Make the dataset of a recording that was cut off: every whole episode of it."""
    recorder: Any = importlib.import_module("real_robot.operator.recorder")
    totals = recorder.finish(folder)
    typer.echo(f"{folder}: {totals['episodes']} episodes, {totals['frames']} frames")
