"""Commands that train a policy: `train`, `sft`; how every command reads its recipe and makes its run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume, say, stopped
from vla_rl.common.atomic import DiskFullError
from vla_rl.common.distributed.process_group import ALONE, ProcessGroup, check_command, num_launched
from vla_rl.common.errors import ConfigError
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.data.hub import pinned
from vla_rl.recipe.recipe import ANY, Command, Recipe, Run, check, load_recipe
from vla_rl.workflows import training_by
from vla_rl.workflows.jobs import Cluster

app = typer.Typer()
# Kinds of run by which `train` learns otherwise than by rounds of RL.
OTHERWISE = ("offline", "online", "hil", "rac")


@app.command()
def train(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy, as the recipe's `run` says.

    train: reinforcement learning. offline: from logged episodes alone, successes and failures. online: by a critic of
    every episode that the policy runs, which is frozen. hil: the same with a person beside it. rac: rounds of a
    scripted person's corrections, and cloning.
    """
    loaded = load_run(recipe, overrides, output, resume)
    if loaded.run in OTHERWISE:
        check_command(loaded.run)
        start(training_by(loaded.run), loaded, output, resume)
    else:  # A loop's recipe has RL too.
        from vla_rl.training.train import RUN

        start(RUN, loaded, output, resume)


@app.command()
def sft(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    run(training_by("sft"), recipe, overrides, output, resume)


def cluster_of(address: str | None, cpus: int, gpus: float) -> Cluster | None:
    """Where jobs run, by the options above; None: here."""
    return Cluster(address, cpus, gpus) if address else None


def load[R: Recipe](recipe: str, overrides: list[str] | None, command: Command[R], runs: bool = True) -> R:
    """Return the recipe with the command line's overrides, checked for a command; where it `runs`, for this machine."""
    loaded = load_recipe(recipe, overrides or ())
    if runs:
        loaded.check_machine()
    return check(loaded, command)


def run[R: Recipe](
    kind: Run[R], recipe: str | None, overrides: list[str] | None, output: Path | None, resume: bool
) -> None:
    """Make a run of a recipe, or resume one."""
    start(kind, load_run(recipe, overrides, output, resume), output, resume)


def start[R: Recipe](kind: Run[R], recipe: Recipe, output: Path | None, resume: bool) -> None:
    """Start a run, or resume one: its datasets, folder and processes, Ctrl-C, and what it came to."""
    loaded = check(recipe, kind.command)
    if datasets := kind.datasets(loaded):
        loaded = pinned(loaded, say, *datasets)
    opened = partial(open_run, loaded, output, resume, free=kind.free, check=kind.check_changes, first=True)
    with opened_run(loaded, kind.name, opened) as (world, folder):
        lines = kind.start(loaded, folder, resume, say)
    if world.is_main:
        typer.echo("\n".join(lines))


@contextmanager
def opened_run(recipe: Recipe, command: str, opened: Callable[[], Path]) -> Iterator[tuple[ProcessGroup, Path]]:
    """Join the processes that a launcher started, if one did, and open the run's folder, for a block.

    On Ctrl-C, or where the disk is full, it says that the run is saved and how to resume it.
    """
    with nullcontext(ALONE) if num_launched() == 1 else _launched(recipe) as world:
        folder = Path(world.broadcast_from_main(lambda: str(opened())))
        again = f"vla-rl {command} --resume --output {shlex.quote(str(folder))}"
        try:
            yield world, folder
        except DiskFullError as error:
            raise DiskFullError(error.errno, f"{error.strerror}. To resume the run:\n  {again}") from error
        except KeyboardInterrupt:
            raise stopped(f"The run is saved in {folder}; to resume it:\n  {again}") from None


def _launched(recipe: Recipe) -> AbstractContextManager[ProcessGroup]:
    from vla_rl.common.distributed.launched import launched_group

    return launched_group(recipe)


def load_run(recipe: str | None, overrides: list[str] | None, output: Path | None, resume: bool) -> Recipe:
    """Return the recipe of a run, with overrides: the one that is named, or of a run to resume its own."""
    if recipe is None or ("=" in recipe and not Path(recipe).is_file()):
        recipe, overrides = _of_run(output, resume), [*([recipe] if recipe else []), *(overrides or ())]
    return load(recipe, overrides, ANY)


def _of_run(folder: Path | None, resume: bool) -> str:
    """The file of a run's own recipe; a ConfigError says that there is no run to resume."""
    if not resume or folder is None:
        raise ConfigError("name a RECIPE (`vla-rl list recipes`), or resume a run: --resume --output FOLDER")
    if not RunFolder(folder).exists:
        raise ConfigError(f"--resume: {folder} holds no earlier run (no config.yaml); see --output")
    return str(RunFolder(folder).config)
