"""Commands about what is installed and configured: `list`, `config` and `doctor`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from real_robot.contract.load import is_contract, load_contract, shipped_contracts
from real_robot.doctor.robot_check import check_robot
from vla_rl.cli.options import Overrides, recipe_names
from vla_rl.cli.running import load
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.common.tables import report
from vla_rl.config import (
    KINDS,
    apply_overrides,
    build_component,
    dump_yaml,
    find_recipe,
    read_yaml,
    recipes_folder,
    resolve_kind,
)
from vla_rl.data.health import check_datasets
from vla_rl.recipe.recipe import ANY
from vla_rl.recipe.schema import recipe_schema
from vla_rl.workflows.doctor import check_recipe, first_command, read_recipe, run_checks


class Listing(StrEnum):
    """What `vla-rl list` can show."""

    recipes = "recipes"
    envs = "envs"
    policies = "policies"
    algos = "algos"
    tasks = "tasks"


_SECTIONS = {Listing.envs: "env", Listing.policies: "policy", Listing.algos: "algo"}


app = typer.Typer()


@app.command("list")
def list_things(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENV | RECIPE [KEY=VALUE]...]", help="For tasks: the environment and its options, or a recipe."
        ),
    ] = None,
) -> None:
    """List recipes, or the kinds of environment, policy and algorithm, or an environment's tasks.

    A task's number, where it has one, and its name both do in env.tasks.
    """
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
    return [
        (path.stem, str(read_yaml(path).get("description", ""))) for path in sorted(recipes_folder().glob("*.yaml"))
    ]


def _kinds(section: str) -> list[tuple[str, str]]:
    rows = []
    for kind in KINDS[section]:
        try:
            doc = (resolve_kind(section, kind).__doc__ or "").strip().splitlines()
            rows.append((kind, doc[0] if doc else ""))
        except ConfigError as error:
            rows.append((kind, f"not usable here: {error}"))
    return rows


def _tasks(options: list[str]) -> list[tuple[str, str]]:
    name, *overrides = options
    try:
        is_recipe = name not in KINDS["env"] and bool(find_recipe(name))
    except ConfigError:
        is_recipe = False
    if is_recipe:
        recipe = load(name, overrides, ANY, runs=False)
        env: Any = recipe.real_env or recipe.env
    else:
        env = build_component("env", apply_overrides({"kind": name}, overrides))
    spec = env.env_spec()
    return [(spec.labels[task], task) for task in spec.tasks] if spec.labels else list(spec.tasks.items())


@app.command()
def doctor(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE | ROBOT]", help="Check what this recipe needs, or this robot's live topics."),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dataset: Annotated[
        list[Path] | None, typer.Option(help="Look at this dataset instead; several are compared with the first.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=600.0, help="How long a robot is listened to.")] = 5.0,
    connect: Annotated[
        bool, typer.Option("--connect", help="Connect to a robot of LeRobot's too, which turns its motors on.")
    ] = False,
) -> None:
    """Report what this machine has and lacks, or what is wrong with a robot's topics or a dataset, and what to do.

    Of a robot (a contract, or the name of a shipped one) it listens and looks around; it never sends a command.
    """
    if dataset:
        if name is not None:
            raise ConfigError(f"doctor: got {name} and --dataset; look at one after the other")
        raise typer.Exit(report(check_datasets(dataset), as_json))
    words: list[str] = [name or "", *(overrides or ())]
    if name is None:
        checks, words = run_checks(), ["demo"]
    elif is_contract(name):
        checks = check_robot(load_contract(name, overrides or ()), seconds, connect)
        words = ["deploy", *words, "--instruction", "...", "--dry-run"]
    else:
        _check_is_recipe(name)
        values = read_recipe(name, overrides or ())
        checks = [*run_checks(values), check_recipe(name, overrides or ())]
        words = [*first_command(values).split(), *words]
    if not (code := report(checks, as_json)) and not as_json:
        typer.echo(next_command(*words))
    raise typer.Exit(code)


def _check_is_recipe(name: str) -> None:
    """
    Raises:
        ConfigError: it is none, nor anything else that `doctor` looks at, all of which the message names.
    """
    try:
        find_recipe(name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} doctor also takes a robot: the file of its contract, or one that ships with the package "
            f"({', '.join(shipped_contracts())}). `vla-rl doctor` alone looks at this machine, `vla-rl doctor "
            "--dataset FOLDER` at a dataset."
        ) from None


@app.command()
def config(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A YAML file or a shipped recipe.", autocompletion=recipe_names),
    ] = None,
    overrides: Overrides = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of all recipes, for editors.")
    ] = False,
) -> None:
    """Print a resolved recipe as YAML, every default included; or the JSON schema of recipes."""
    if schema == (recipe is not None):
        raise ConfigError("config: give a RECIPE (`vla-rl list recipes`), or --schema")
    if recipe is None:
        typer.echo(json.dumps(recipe_schema(), indent=1))
    else:
        typer.echo(dump_yaml(load(recipe, overrides, ANY, runs=False)), nl=False)
