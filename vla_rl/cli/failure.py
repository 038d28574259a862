"""`vla-rl failure fit | eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example failure.alpha=0.1")
]

failure_app = typer.Typer(
    no_args_is_help=True, help="Notice that a policy is about to fail: fit detectors, measure them."
)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.add_typer(failure_app, name="failure")


@failure_app.command()
def fit(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME-DATE-TIME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --output, else in the newest run.")] = False,
    episodes_of: Annotated[
        Path | None, typer.Option("--episodes-of", help="Use the episodes embedded in this run's folder again.")
    ] = None,
) -> None:
    """Fit failure detectors for a policy's checkpoint, and calibrate their thresholds on its successes."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.failure_detection import fit_failure

    loaded = load_recipe(recipe, overrides or ())
    folder = open_run(loaded, output, resume)
    for path in fit_failure(loaded, folder, lambda text: typer.echo(text, err=True), episodes_of):
        typer.echo(f"detector: {path}")


@failure_app.command(name="eval")
def evaluate(
    recipe: RecipeName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `failure fit` wrote.")],
    overrides: Overrides = None,
    episodes_of: Annotated[
        Path | None, typer.Option("--episodes-of", help="Use the episodes embedded in this run's folder again.")
    ] = None,
) -> None:
    """Measure detectors on held-out episodes: table, failure.json, failure.html."""
    from rich.console import Console

    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.failure_detection import evaluate_failure

    loaded = load_recipe(recipe, overrides or ())
    report, page = evaluate_failure(loaded, folder, lambda text: typer.echo(text, err=True), episodes_of)
    Console().print(report.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")
