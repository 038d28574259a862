"""Commands that train a policy: `train`, `sft`, `offline`, `online`, `rac`, `hil`."""

from __future__ import annotations

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume
from vla_rl.cli.running import run
from vla_rl.workflows import run_of

app = typer.Typer()


@app.command()
def train(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy by reinforcement learning."""
    run(run_of("train"), recipe, overrides, output, resume)


@app.command()
def sft(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    run(run_of("sft"), recipe, overrides, output, resume)


@app.command()
def offline(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from logged episodes alone, without an environment: successes and failures both teach."""
    run(run_of("offline"), recipe, overrides, output, resume)


@app.command()
def online(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """Improve a policy from every episode that it runs, and those logged before, by a critic; the policy is frozen."""
    run(run_of("online"), recipe, overrides, output, resume)


@app.command()
def rac(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Rounds in a simulator: a policy with a scripted person beside it, then training on what was corrected."""
    run(run_of("rac"), recipe, overrides, output, resume)


@app.command()
def hil(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Improve a policy while it acts with a person beside it: a learner, and an actor in a process of its own."""
    run(run_of("hil"), recipe, overrides, output, resume)
