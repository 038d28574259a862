"""Commands that train a policy: `train`, `sft`."""

from __future__ import annotations

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume
from vla_rl.cli.running import load_run, run, start
from vla_rl.common.distributed.process_group import check_command
from vla_rl.recipe.checks import ANY
from vla_rl.workflows import training_by

app = typer.Typer()
KINDS = ("offline", "online", "hil", "rac")  # Of recipes, beside those that `train` does RL by.


@app.command()
def train(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy, as the recipe's `run` says.

    train: reinforcement learning. offline: from logged episodes alone, successes and failures. online: by a critic of
    every episode that the policy runs, which is frozen. hil: the same with a person beside it. rac: rounds of a
    scripted person's corrections, and cloning.
    """
    loaded = load_run(recipe, overrides, output, resume, ANY)
    kind = loaded.run if loaded.run in KINDS else "train"
    check_command(kind)
    start(training_by(kind), loaded, output, resume)


@app.command()
def sft(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    run(training_by("sft"), recipe, overrides, output, resume)
