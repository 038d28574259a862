"""`vla-rl reward fit | eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume, load, run, say


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    group = typer.Typer(
        no_args_is_help=True, help="Learn a reward from episodes of which it is known how they ended, and measure it."
    )
    group.command()(fit)
    group.command(name="eval")(evaluate)
    app.add_typer(group, name="reward")


def fit(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Fit a reward on recorded episodes; its threshold and probabilities on initial states held out."""
    from vla_rl.workflows.reward import RUN

    run(RUN, recipe, overrides, output, resume)


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder that `reward fit` wrote.")],
    overrides: Overrides = None,
) -> None:
    """Measure a reward on the held-out episodes of its recipe, by task: table, reward.json, reward.html."""
    from vla_rl.common.run_folder import RunFolder
    from vla_rl.common.tables import print_table
    from vla_rl.config import ConfigError
    from vla_rl.recipe.checks import REWARD
    from vla_rl.workflows import reward

    fitted = RunFolder(folder)
    if not fitted.exists:
        raise ConfigError(f"{folder}: no run of `vla-rl reward fit` (no config.yaml); name its folder")
    result, page = reward.evaluate(load(str(fitted.config), overrides, REWARD), folder, say)
    print_table(result.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")
