"""`vla-rl reward fit | eval` and `vla-rl failure fit | eval`: what learns to tell how episodes end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, RecipeName, Resume, say
from vla_rl.cli.running import load, run
from vla_rl.common.errors import ConfigError
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import print_table
from vla_rl.recipe.checks import FAILURE, REWARD
from vla_rl.workflows.failure_detection import evaluate_failure, fit_run
from vla_rl.workflows.reward import RUN, evaluate

EpisodesOf = Annotated[
    Path | None, typer.Option("--episodes-of", help="Use the episodes embedded in this run's folder again.")
]


app = typer.Typer()
reward = typer.Typer(
    no_args_is_help=True, help="Learn a reward from episodes of which it is known how they ended, and measure it."
)
failure = typer.Typer(no_args_is_help=True, help="Notice that a policy is about to fail: fit detectors, measure them.")
app.add_typer(reward, name="reward")
app.add_typer(failure, name="failure")


@reward.command("fit")
def fit_reward(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Fit a reward on recorded episodes; its threshold and probabilities on initial states held out."""
    run(RUN, recipe, overrides, output, resume)


@reward.command("eval")
def evaluate_reward(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder that `reward fit` wrote.")],
    overrides: Overrides = None,
) -> None:
    """Measure a reward on the held-out episodes of its recipe, by task: table, reward.json, reward.html."""
    fitted = RunFolder(folder)
    if not fitted.exists:
        raise ConfigError(f"{folder}: no run of `vla-rl reward fit` (no config.yaml); name its folder")
    result, page = evaluate(load(str(fitted.config), overrides, REWARD), folder, say)
    print_table(result.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")


@failure.command("fit")
def fit_detectors(
    recipe: OwnRecipe = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
    episodes_of: EpisodesOf = None,
) -> None:
    """Fit failure detectors for a policy's checkpoint, and calibrate their thresholds on its successes."""
    run(fit_run(episodes_of), recipe, overrides, output, resume)


@failure.command("eval")
def evaluate_detectors(
    recipe: RecipeName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `failure fit` wrote.")],
    overrides: Overrides = None,
    episodes_of: EpisodesOf = None,
) -> None:
    """Measure detectors on held-out episodes: table, failure.json, failure.html."""
    report, page = evaluate_failure(load(recipe, overrides, FAILURE), folder, say, episodes_of)
    print_table(report.table())
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")
