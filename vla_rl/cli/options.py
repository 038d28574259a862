"""What commands share: arguments and options, reading a recipe, and how a stopped run is continued."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vla_rl.distributed.process_group import ProcessGroup
    from vla_rl.recipe.checks import Command, Run
    from vla_rl.recipe.recipe import Recipe
    from vla_rl.workflows.jobs import Cluster

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
# How a workflow starts commands of this program in processes of their own.
PROGRAM = (sys.executable, "-m", str(__package__))


def _recipe_names(incomplete: str) -> list[str]:
    """The shipped recipes whose names begin so, for a shell's completion."""
    from vla_rl.config import recipes_folder

    return sorted(path.stem for path in recipes_folder().glob("*.yaml") if path.stem.startswith(incomplete))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe (`vla-rl list recipes`).",
        autocompletion=_recipe_names,
    ),
]
OwnRecipe = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="A YAML file or a shipped recipe; none to --resume what is in --output.",
        autocompletion=_recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example algo.optim.lr=1e-5")
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


def cluster_of(address: str | None, cpus: int, gpus: float) -> Cluster | None:
    """Where jobs run, by the options above; None: here."""
    from vla_rl.workflows.jobs import Cluster

    return Cluster(address, cpus, gpus) if address else None


def load[R: Recipe](recipe: str, overrides: list[str] | None, command: Command[R], runs: bool = True) -> R:
    """Return the recipe with the command line's overrides, checked for a command and for this machine.

    Args:
        runs: false where it is only looked at, which any machine can.
    """
    from vla_rl.recipe.checks import check
    from vla_rl.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if runs:
        loaded.check_machine()
    return check(loaded, command)


def run[R: Recipe](
    kind: Run[R], recipe: str | None, overrides: list[str] | None, output: Path | None, resume: bool
) -> None:
    """Make a run, or resume one: its recipe, datasets, folder and processes, Ctrl-C, and what it came to."""
    from vla_rl.common.run_folder import open_run

    loaded = load_run(recipe, overrides, output, resume, kind.command)
    kind.look(loaded)
    if datasets := kind.datasets(loaded):
        from vla_rl.data.hub import pinned

        loaded = pinned(loaded, say, *datasets)

    def opened() -> str:
        return str(open_run(loaded, output, resume, free=kind.free, check=kind.check_changes(loaded)))

    with joined(loaded) as world:
        folder = Path(world.broadcast_from_main(opened))
        with resumable(kind.name, folder):
            lines = kind.start(loaded, folder, resume, say)
        if world.is_main:
            typer.echo("\n".join(lines))


def joined(recipe: Recipe) -> AbstractContextManager[ProcessGroup]:
    """Join the processes that a launcher started, for a block; without a launcher: this process alone.

    Raises:
        ConfigError: the recipe has what does not work in several processes.
    """
    from vla_rl.distributed.process_group import ALONE, num_launched

    if num_launched() == 1:
        return nullcontext(ALONE)
    from vla_rl.distributed.launched import launched_group

    return launched_group(recipe)


def load_run[R: Recipe](
    recipe: str | None, overrides: list[str] | None, output: Path | None, resume: bool, command: Command[R]
) -> R:
    """Return the recipe of a run, with overrides: the one that is named, or of a run to resume its own."""
    if recipe is None or ("=" in recipe and not Path(recipe).is_file()):
        return load(_of_run(output, resume), [*([recipe] if recipe else []), *(overrides or ())], command)
    return load(recipe, overrides, command)


def _of_run(folder: Path | None, resume: bool) -> str:
    """The file of a run's own recipe; a ConfigError says that there is no run to resume."""
    from vla_rl.common.run_folder import RunFolder
    from vla_rl.config import ConfigError

    if not resume or folder is None:
        raise ConfigError("name a RECIPE (`vla-rl list recipes`), or resume a run: --resume --output FOLDER")
    if not RunFolder(folder).exists:
        raise ConfigError(f"--resume: {folder} holds no earlier run (no config.yaml); see --output")
    return str(RunFolder(folder).config)


def say(text: str) -> None:
    """Print what is going on, where it does not mix with a command's result."""
    typer.echo(text, err=True)


@contextmanager
def resumable(command: str, folder: Path) -> Iterator[None]:
    """On Ctrl-C, say that the run is saved and how to resume it."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"vla-rl {command} --resume --output {shlex.quote(str(folder))}"
        raise stopped(f"The run is saved in {folder}; to resume it:\n  {again}") from None


def stopped(advice: str) -> typer.Exit:
    """Say what is kept of a command that Ctrl-C stopped, and return the exit to raise."""
    say(f"\nStopped. {advice}")
    return typer.Exit(EXIT_INTERRUPTED)


def check_writable(output: Path | None) -> None:
    """Refuse, before any work, a file or folder to write where none can be written.

    Raises:
        ConfigError: in the nearest folder above it that is there, nothing can be made; or that is a file.
    """
    import tempfile

    from vla_rl.config import ConfigError

    if output is not None:
        above = next(path for path in output.absolute().parents if path.exists())
        try:
            with tempfile.TemporaryFile(dir=above):
                pass
        except OSError as error:
            raise ConfigError(f"--output {output}: {above}: {error.strerror}; choose another --output") from None
