"""The program: its groups of commands, and how errors and Ctrl-C end it.

Nothing heavy is imported before a command runs, so that `vla-rl --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vla_rl import __version__
from vla_rl.cli import (
    about,
    calibrate,
    checkpoints,
    evaluation,
    failure,
    hub,
    importing,
    loop,
    plan,
    rac,
    reward,
    robot,
    serve,
    training,
    world_model,
)
from vla_rl.cli.options import EXIT_INTERRUPTED, EXIT_USER_ERROR
from vla_rl.common.errors import ConfigError, check_packages

BUILT_IN = (ValueError, RuntimeError, NotImplementedError, ImportError)
OUR_PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")


class _Group(TyperGroup):
    """Turns what a person can mend into one message, and Ctrl-C into its usual exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # Its base names a private class.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("\nstopped", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if not is_for_people(error) or isinstance(error, BrokenPipeError):  # `| head` is no mistake
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            typer.echo(f"error: {error}", err=True)
            raise SystemExit(EXIT_USER_ERROR) from None


def is_for_people(error: Exception) -> bool:
    """Whether an error's message was written for the user, so that a traceback would only bury it.

    True for errors of the system (file not found, disk full), for error classes of ours, and for the
    built-in ones below where our own code raises them; the same from inside a library is a bug.
    """
    if isinstance(error, OSError) or type(error).__module__.split(".")[0] in OUR_PACKAGES:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""
    return type(error) in BUILT_IN and raised_in.split(".")[0] in OUR_PACKAGES


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-train vision-language-action policies with reinforcement learning, and know whether they got better.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vla-rl {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command; `_Group.invoke` reads them."""
    from vla_rl.distributed.process_group import num_launched

    if num_launched() > 1:
        from vla_rl.distributed.launched import check_command

        check_command(context.invoked_subcommand)


GROUPS = (
    *(training, evaluation, loop, about, plan, checkpoints, importing),
    *(serve, robot, calibrate, rac, world_model, failure, reward, hub),
)
for group in GROUPS:
    group.register(app)


def main() -> None:
    """Run the program. Recipes may name classes of the current folder, which comes last and so hides no package."""
    try:
        check_packages(OUR_PACKAGES)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    ours = str(Path(__file__).resolve().parents[2])
    sys.path += [folder for folder in (ours, os.getcwd()) if folder not in sys.path]  # Ours: as a clone, by a finder.
    app()
