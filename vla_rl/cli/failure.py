"""`vla-rl failure fit | eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, RecipeName, Resume, say
from vla_rl.cli.running import load, run
from vla_rl.common.tables import print_table
from vla_rl.recipe.checks import FAILURE
from vla_rl.workflows.failure_detection import evaluate_failure

EpisodesOf = Annotated[
    Path | None, typer.Option("--episodes-of", help="Use the episodes embedded in this run's folder again.")
]


app = typer.Typer(no_args_is_help=True, help="Notice that a policy is about to fail: fit detectors, measure them.")


@app.command()
def fit(
    recipe: OwnRecipe = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    episodes_of: EpisodesOf = None,
) -> None:
    """Fit failure detectors for a policy's checkpoint, and calibrate their thresholds on its successes."""
    from vla_rl.workflows.failure_detection import fit_run

    run(fit_run(episodes_of), recipe, overrides, output, resume)


@app.command("eval")
def evaluate(
    recipe: RecipeName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `failure fit` wrote.")],
    overrides: Overrides = None,
    episodes_of: EpisodesOf = None,
) -> None:
    """Measure detectors on held-out episodes: table, failure.json, failure.html."""
    report, page = evaluate_failure(load(recipe, overrides, FAILURE), folder, say, episodes_of)
    print_table(report.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")
