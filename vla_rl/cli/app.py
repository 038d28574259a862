"""The program: its commands, each in a file that is imported when it is asked for; how errors and Ctrl-C end it.

So that `vla-rl --help` answers at once, and these files import what they run as any other does.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vla_rl import __version__
from vla_rl.cli.options import EXIT_INTERRUPTED, EXIT_USER_ERROR
from vla_rl.common.distributed.process_group import check_command, num_launched
from vla_rl.common.errors import ConfigError

BUILT_IN = (ValueError, RuntimeError, NotImplementedError, ImportError)
OUR_PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")
_OURS = Path(__file__).resolve().parents[2]
_PYTHONS_FORMAT = warnings.formatwarning


class _Group(TyperGroup):
    """Turns what a person can mend into one message, and Ctrl-C into its usual exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        if num_launched() > 1:
            check_command(name)
        for word, following in zip(rest, [*rest, "VALUE"][1:], strict=True):
            key, _, value = word.removeprefix("--").partition("=")
            if word.startswith("--") and "." in key:
                raise ConfigError(f"{word}: a recipe's options are typed without dashes: {key}={value or following}")
        return name, name and loaded(name), rest

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("version"):
            return typer.echo(f"vla-rl {__version__}")
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


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Options of every command; `_Group.invoke` reads them."""


# Every command, or group of them: the file that has it, and a line of the program's own help.
COMMANDS = {
    "demo": ("loop", "The whole loop on the built-in tabletop, with a report."),
    "train": ("running", "Post-train a policy: by RL, or as the recipe's `run` says."),
    "sft": ("running", "Train a policy by behavior cloning on demonstrations."),
    "loop": ("loop", "Rounds of real episodes, a world model, RL in imagination."),
    "sweep": ("loop", "Many runs in one table: options' values, or controls."),
    "eval": ("evaluation", "Measure success per task, with intervals."),
    "reproduce": ("plan", "Repeat a published result: its cost, power, run, row."),
    "compare": ("evaluation", "Is B better than A? Paired on initial states."),
    "report": ("checkpoints", "Where a run is, and its report.html."),
    "collect": ("evaluation", "Record an expert's or a policy's episodes as a dataset."),
    "import": ("importing", "Make a dataset of LIBERO's, RLDS, bags, videos and CSV."),
    "inspect": ("checkpoints", "Say what a checkpoint is, and what RL can do with it."),
    "merge": ("checkpoints", "Merge LoRA adapters into their base, and verify it."),
    "push": ("checkpoints", "Upload a policy or a dataset to the Hugging Face Hub."),
    "world-model": ("world_model", "Fit a world model, and measure how far to trust it."),
    "reward": ("outcomes", "Learn a reward from episodes with known outcomes."),
    "failure": ("outcomes", "Notice that a policy is about to fail."),
    "serve": ("deploy", "Serve a policy to robots."),
    "deploy": ("deploy", "Drive a robot by a served policy, behind a supervisor."),
    "robot": ("robot", "Beside a robot: its guard, a simulated one, ROS."),
    "calibrate": ("calibrate", "Where a robot's camera is, its lens, the workspace."),
    "hub": ("hub", "Several robots, one person: a queue for help."),
    "list": ("about", "List recipes, environments, policies, algorithms, tasks."),
    "config": ("about", "Print a resolved recipe, or the JSON schema of recipes."),
    "doctor": ("about", "What this machine, a recipe, robot or dataset lacks."),
    "plan": ("plan", "The time and memory that a run will take on GPUs."),
    "bench": ("plan", "Measure speed: simulators, imagination, a GPU."),
}
# Packages that are installed with an extra of ours alone.
EXTRAS = {"websockets": "robot", "rosbags": "ros"}


def loaded(name: str) -> Any:
    """Return a command or group of `COMMANDS`, of its file, which is imported; a ConfigError names a package amiss."""
    from vla_rl.config import check_packages

    check_packages()
    try:
        group = typer.main.get_group(import_module(f"{__package__}.{COMMANDS[name][0]}").app)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ConfigError(f"{name}: {package} is not installed. Run: pip install '.[{EXTRAS[package]}]'") from error
    return group.commands.get(name, group)


def program() -> Any:
    """Return the program with every command, all of their files imported."""
    whole = typer.main.get_command(app)
    assert isinstance(whole, TyperGroup)
    whole.commands = {name: loaded(name) for name in COMMANDS}
    return whole


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours for the one who typed the command; a library's as Python writes it, with its line of source."""
    if any(Path(filename).is_relative_to(_OURS / package) for package in OUR_PACKAGES):
        return f"warning: {message}\n"
    return _PYTHONS_FORMAT(message, category, filename, lineno, line)


def main() -> None:
    """Run the program. Recipes may name classes of the current folder, which comes last and so hides no package."""
    sys.path += [name for name in (str(_OURS), os.getcwd()) if name not in sys.path]  # Ours: as a clone, by a finder.
    warnings.formatwarning = format_warning
    app()
