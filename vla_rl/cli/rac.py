"""Commands of learning beside a person: rac, hil, finish-recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume, run


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(rac)
    app.command()(hil)
    app.command(name="finish-recording")(finish_recording)


def rac(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Rounds in a simulator: a policy with a scripted person beside it, then training on what was corrected."""
    from vla_rl.workflows.rac import RUN

    run(RUN, recipe, overrides, output, resume)


def hil(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Improve a policy while it acts with a person beside it: a learner, and an actor in a process of its own."""
    from vla_rl.workflows.hil import RUN

    run(RUN, recipe, overrides, output, resume)


def finish_recording(
    folder: Annotated[Path, typer.Argument(help="The dataset's folder, as it was given to the recorder.")],
) -> None:
    """Make the dataset of a recording that was cut off: every whole episode of it."""
    from real_robot.operator.recording_folder import finish

    totals = finish(folder)
    typer.echo(f"{folder}: {totals['episodes']} episodes, {totals['frames']} frames")
