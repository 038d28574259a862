"""Commands about what is installed and configured: `list`, `config`, `doctor` and `bench`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vla_rl.cli.options import Overrides, RecipeName, load


class Listing(StrEnum):
    """What `vla-rl list` can show."""

    recipes = "recipes"
    envs = "envs"
    policies = "policies"
    algos = "algos"
    tasks = "tasks"


_SECTIONS = {Listing.envs: "env", Listing.policies: "policy", Listing.algos: "algo"}


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    # No help option of click's: behind WHAT, --help belongs to the benchmark; `bench` answers it where there is none.
    passes_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}
    app.command(context_settings=passes_on)(bench)
    app.command(name="list")(list_things)
    app.command()(doctor)
    config = typer.Typer(no_args_is_help=True, help="Show a resolved recipe, or export the JSON schema of recipes.")
    config.command("show")(config_show)
    config.command("schema")(config_schema)
    app.add_typer(config, name="config")


def bench(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="env: steps/s; imagination: frames/s; gpu: a GPU."),
    ] = "env",
) -> None:
    """Measure speed on this machine. Further arguments go to the benchmark: `vla-rl bench env --help` lists its own."""
    if what in ("-h", "--help"):
        typer.echo(context.get_help())
        return
    if what == "env":
        from sim.bench import main
    elif what == "imagination":
        from world_model.imagination.bench import main
    elif what == "gpu":
        from vla_rl.workflows.gpu_bench.command import main
    else:
        from vla_rl.config import ConfigError

        raise ConfigError(f"bench: got {what!r}, allowed: env, imagination, gpu")
    raise typer.Exit(main(context.args))


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
    from vla_rl.config import KINDS, ConfigError, apply_overrides, build_component, find_recipe
    from vla_rl.recipe.checks import ANY

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
    from real_robot.contract.load import is_contract, load_contract
    from vla_rl.common.checks import report

    if dataset:
        from vla_rl.config import ConfigError
        from vla_rl.data.health import check_datasets

        if name is not None:
            raise ConfigError(f"doctor: got {name} and --dataset; look at one after the other")
        raise typer.Exit(report(check_datasets(dataset), as_json))
    if name is not None and is_contract(name):
        from real_robot.doctor.robot_check import check_robot

        raise typer.Exit(report(check_robot(load_contract(name, overrides or ()), seconds, connect), as_json))
    from vla_rl.workflows.doctor import check_recipe, read_recipe, run_checks

    if name is None:
        raise typer.Exit(report(run_checks(), as_json))
    _check_is_recipe(name)
    checks = run_checks(read_recipe(name, overrides or ()))
    raise typer.Exit(report([*checks, check_recipe(name, overrides or ())], as_json))


def _check_is_recipe(name: str) -> None:
    """
    Raises:
        ConfigError: it is none, nor anything else that `doctor` looks at, all of which the message names.
    """
    from real_robot.contract.load import shipped_contracts
    from vla_rl.config import ConfigError, find_recipe

    try:
        find_recipe(name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} doctor also takes a robot: the file of its contract, or one that ships with the package "
            f"({', '.join(shipped_contracts())}). `vla-rl doctor` alone looks at this machine, `vla-rl doctor "
            "--dataset FOLDER` at a dataset."
        ) from None


def config_show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML, every default included."""
    from vla_rl.config import dump_yaml
    from vla_rl.recipe.checks import ANY

    typer.echo(dump_yaml(load(recipe, overrides, ANY, runs=False)), nl=False)


def config_schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    import json

    from vla_rl.recipe.schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=1))
