"""What commands share: arguments and options, what they say, and where they may write."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.common.errors import ConfigError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# How a workflow starts commands of this program in processes of their own.
PROGRAM = (sys.executable, "-m", "vla_rl")


def recipe_names(incomplete: str) -> list[str]:
    """The shipped recipes whose names begin so, for a shell's completion."""
    from vla_rl.config import recipes_folder

    return sorted(path.stem for path in recipes_folder().glob("*.yaml") if path.stem.startswith(incomplete))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe (`vla-rl list recipes`).",
        autocompletion=recipe_names,
    ),
]
OwnRecipe = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="A YAML file or a shipped recipe; none to --resume what is in --output.",
        autocompletion=recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example algo.optim.lr=1e-5")
]
ContractOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the contract, for example rate=10")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME-DATE-TIME.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --output, else with the recipe's newest.")]

RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        envvar="RAY_ADDRESS",
        help="Run them on the machines of a Ray cluster, which share --output: auto, or HOST:PORT.",
    ),
]
JobCpus = Annotated[int, typer.Option(min=1, help="With --ray: CPUs that each run reserves.")]
JobGpus = Annotated[float, typer.Option(min=0, help="With --ray: GPUs that each run reserves; 0: it sees none.")]


def say(text: str) -> None:
    """Print what is going on, where it does not mix with a command's result."""
    typer.echo(text, err=True)


def stopped(advice: str) -> typer.Exit:
    """Say what is kept of a command that Ctrl-C stopped, and return the exit to raise."""
    say(f"\nStopped. {advice}")
    return typer.Exit(EXIT_INTERRUPTED)


def check_writable(output: Path | None) -> None:
    """Refuse, before any work, a file or folder to write where none can be written.

    Raises:
        ConfigError: in the nearest folder above it that is there, nothing can be made; or that is a file.
    """
    if output is not None:
        above = next(path for path in output.absolute().parents if path.exists())
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as error:
            raise ConfigError(f"--output {output}: {above}: {error.strerror}; choose another --output") from None
