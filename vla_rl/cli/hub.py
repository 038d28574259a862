"""`vla-rl hub measure`: several robots, one person."""

from __future__ import annotations

import typer

from vla_rl.cli.options import Output, Overrides, RecipeName, Resume, load, say


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    group = typer.Typer(no_args_is_help=True, help="Several robots, one person: a queue of requests for help.")
    group.command()(measure)
    app.add_typer(group, name="hub")


def measure(recipe: RecipeName, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """In a simulator, with a scripted person: success, waiting and the person's share of time by number of robots."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.workflows.hub_study import RESULTS, TABLE, measure_hub

    loaded = load(recipe, overrides)
    folder = open_run(loaded, output, resume)
    measure_hub(loaded, folder, say)
    typer.echo((folder / TABLE).read_text())
    typer.echo(f"written: {folder / RESULTS}")
