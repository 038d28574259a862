"""`vla-rl reward fit | eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume, say
from vla_rl.cli.running import load, run
from vla_rl.common.errors import ConfigError
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import print_table
from vla_rl.recipe.checks import REWARD
from vla_rl.workflows import reward
from vla_rl.workflows.reward import RUN

app = typer.Typer(
    no_args_is_help=True, help="Learn a reward from episodes of which it is known how they ended, and measure it."
)


@app.command()
def fit(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Fit a reward on recorded episodes; its threshold and probabilities on initial states held out."""
    run(RUN, recipe, overrides, output, resume)


@app.command("eval")
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder that `reward fit` wrote.")],
    overrides: Overrides = None,
) -> None:
    """Measure a reward on the held-out episodes of its recipe, by task: table, reward.json, reward.html."""
    fitted = RunFolder(folder)
    if not fitted.exists:
        raise ConfigError(f"{folder}: no run of `vla-rl reward fit` (no config.yaml); name its folder")
    result, page = reward.evaluate(load(str(fitted.config), overrides, REWARD), folder, say)
    print_table(result.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")
