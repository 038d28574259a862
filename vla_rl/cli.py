"""The command line. Each command reads its recipe and calls one function of the module that does the work.

Nothing heavy is imported before a command runs, so that `vla-rl --help` answers at once.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from vla_rl.recipe import Recipe

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class _Group(TyperGroup):
    """Turns what a person can mend into one message, and Ctrl-C into its usual exit code."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, NotImplementedError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            else:
                typer.echo(f"error: {error}", err=True)
                if type(error) in (ValueError, NotImplementedError):
                    typer.echo("(`vla-rl --debug ...` shows where it comes from)", err=True)
            raise SystemExit(EXIT_USER_ERROR) from None
        except KeyboardInterrupt:
            typer.echo("\nstopped", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-train vision-language-action policies with reinforcement learning, and know whether they got better.",
)
config_app = typer.Typer(no_args_is_help=True, help="Show a resolved recipe, or export the JSON schema of recipes.")
app.add_typer(config_app, name="config")

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe (`vla-rl list recipes`).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example algo.lr=1e-5")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder [default: runs/NAME-DATE-TIME].")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")]


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `_Group.invoke` reads them."""


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    from vla_rl.recipe import load_recipe

    return load_recipe(recipe, overrides or ())


@contextmanager
def _resumable(command: str, recipe: str, overrides: list[str] | None, folder: Path) -> Iterator[None]:
    """On Ctrl-C, say that the run is saved and how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["vla-rl", command, recipe, *(overrides or ()), "--output", str(folder), "--resume"])
        typer.echo(f"\nStopped. The run is saved in {folder}; to go on with it:\n  {again}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Post-train a policy by reinforcement learning."""
    from vla_rl.run import open_run
    from vla_rl.train import train as run_training

    loaded = _load(recipe, overrides)
    folder = open_run(loaded, output, resume)
    with _resumable("train", recipe, overrides, folder):
        policy = run_training(loaded, folder, resume)
    typer.echo(f"policy: {policy}\nreport: {folder / 'report.html'}")


class Listing(StrEnum):
    """What `vla-rl list` can show."""

    recipes = "recipes"
    envs = "envs"
    policies = "policies"
    algos = "algos"
    tasks = "tasks"


_SECTIONS = {Listing.envs: "env", Listing.policies: "policy", Listing.algos: "algo"}


@app.command(name="list")
def list_things(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENV [KEY=VALUE]...]", help="For tasks: the environment, and its options."),
    ] = None,
) -> None:
    """List recipes, or the kinds of environment, policy and algorithm, or an environment's tasks."""
    if what is Listing.recipes:
        rows = _recipes()
    elif what is Listing.tasks:
        rows = _tasks(options or ["tabletop"])
    else:
        rows = _kinds(_SECTIONS[what])
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}".rstrip())


def _recipes() -> list[tuple[str, str]]:
    from vla_rl.config import read_yaml, recipes_folder

    return [
        (path.stem, str(read_yaml(path).get("description", ""))) for path in sorted(recipes_folder().glob("*.yaml"))
    ]


def _kinds(section: str) -> list[tuple[str, str]]:
    from vla_rl.config import KINDS, ConfigError, resolve_kind

    rows = []
    for kind in KINDS[section]:
        try:
            doc = (resolve_kind(section, kind).__doc__ or "").strip().splitlines()
            rows.append((kind, doc[0] if doc else ""))
        except ConfigError as error:
            rows.append((kind, f"not usable here: {error}"))
    return rows


def _tasks(options: list[str]) -> list[tuple[str, str]]:
    from vla_rl.config import apply_overrides, build_component

    kind, *overrides = options
    env: Any = build_component("env", apply_overrides({"kind": kind}, overrides))
    return list(env.env_spec().tasks.items())


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Check what this recipe needs.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report what this machine has and lacks, and what to do about it."""
    from vla_rl.doctor import read_recipe, report, run_checks

    values = read_recipe(recipe, overrides or ()) if recipe else None
    raise typer.Exit(report(run_checks(values), as_json))


@config_app.command("show")
def config_show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML, every default included."""
    from vla_rl.config import dump_yaml

    typer.echo(dump_yaml(_load(recipe, overrides)), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    import json

    from vla_rl.schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=1))


def main() -> None:
    """The `vla-rl` program."""
    app()


if __name__ == "__main__":
    main()
