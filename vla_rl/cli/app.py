"""The command line. Each command reads its recipe and calls one function of the module that does the work.

Nothing heavy is imported before a command runs, so that `vla-rl --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vla_rl.cli import checkpoints as cli_checkpoints
from vla_rl.cli import failure as cli_failure
from vla_rl.cli import rac as cli_rac
from vla_rl.cli import robot as cli_robot
from vla_rl.cli import serve as cli_serve
from vla_rl.cli import world_model as cli_world_model

if TYPE_CHECKING:
    from vla_rl.recipe.recipe import Recipe

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


BUILT_IN = (ValueError, RuntimeError, NotImplementedError, ImportError)
OUR_PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")


class _Group(TyperGroup):
    """Turns what a person can mend into one message, and Ctrl-C into its usual exit code."""

    def invoke(self, ctx: typer.Context) -> Any:
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
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Post-train vision-language-action policies with reinforcement learning, and know whether they got better.",
)
config_app = typer.Typer(no_args_is_help=True, help="Show a resolved recipe, or export the JSON schema of recipes.")
app.add_typer(config_app, name="config")

world_model_app = typer.Typer(no_args_is_help=True, help="Fit a world model, and measure how far it can be trusted.")
app.add_typer(world_model_app, name="world-model")
cli_world_model.register(world_model_app)


RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe (`vla-rl list recipes`).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example algo.lr=1e-5")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME-DATE-TIME.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --output, else with the recipe's newest.")
]


@app.callback()
def _global_options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `_Group.invoke` reads them."""
    from vla_rl.distributed.process_group import check_command

    check_command(context.invoked_subcommand)


def _load(recipe: str, overrides: list[str] | None) -> Recipe:
    from vla_rl.recipe.recipe import load_recipe

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
    from vla_rl.common.run_folder import open_run
    from vla_rl.distributed.process_group import joined
    from vla_rl.training.train import train as run_training

    loaded = _load(recipe, overrides)
    with joined(loaded) as world:
        folder = Path(world.broadcast_from_main(lambda: str(open_run(loaded, output, resume))))
        with _resumable("train", recipe, overrides, folder):
            policy = run_training(loaded, folder, resume)
        if world.is_main:
            typer.echo(f"policy: {policy}\nreport: {folder / 'report.html'}")


@app.command()
def sft(recipe: RecipeName, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Train a policy by behavior cloning on demonstrations."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.distributed.process_group import joined
    from vla_rl.workflows.commands import sft as run_sft

    loaded = _load(recipe, overrides)
    with joined(loaded) as world:
        folder = Path(world.broadcast_from_main(lambda: str(open_run(loaded, output, resume))))
        with _resumable("sft", recipe, overrides, folder):
            summary = run_sft(loaded, folder)
    if not world.is_main:
        return
    loss = f", loss {summary['loss']:.4f}" if "loss" in summary else ""
    typer.echo(f"policy: {summary['policy']}  ({summary['steps']} steps{loss})")


@app.command()
def collect(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The dataset's folder (collect.dataset).")
    ] = None,
) -> None:
    """Write a LeRobotDataset: the scripted expert's demonstrations, or a policy's episodes."""
    from vla_rl.recipe.collect_config import CollectConfig
    from vla_rl.workflows.commands import collect as run_collect

    loaded = _load(recipe, [*(overrides or ()), *([f"collect.dataset={output}"] if output else [])])
    config = loaded.collect or CollectConfig.model_validate({})
    try:
        summary = run_collect(loaded, config, lambda text: typer.echo(text, err=True))
    except KeyboardInterrupt:
        typer.echo("\nStopped. Finished episodes are kept; the same command goes on from there.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"dataset: {summary['dataset']}  ({summary['episodes']} episodes, {summary['frames']} frames)")
    for task, rate in summary["success_rate"].items():
        typer.echo(f"  {task}: {100 * rate:.0f} % success")


@app.command(name="eval")
def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Output = None,
    name: Annotated[str, typer.Option(help="What is evaluated, for tables and file names.")] = "policy",
) -> None:
    """Evaluate a policy: success per task with its interval, JSON, a picture and videos."""
    from rich.console import Console

    from vla_rl.common.run_folder import open_run
    from vla_rl.config import ConfigError
    from vla_rl.workflows.commands import evaluate as run_evaluation

    loaded = _load(recipe, overrides)
    # A folder that holds the same recipe takes another evaluation, or one that was cut off.
    again = output is not None and (output / "config.yaml").is_file()
    if output is not None and (output / "evaluations" / f"{name}.json").exists():
        raise ConfigError(f"{output} already holds an evaluation {name!r}; choose another --name or --output")
    folder = open_run(loaded, output, resume=again)
    Console().print(run_evaluation(loaded, folder, name).table())
    typer.echo(f"written: {folder / 'evaluations' / f'{name}.json'}\nreport: {folder / 'report.html'}")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run's folder, or an evaluation's JSON file.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another. Without it: base and final of run A.")
    ] = None,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Run policies A and B (folders) in this recipe's environment; stops when clear.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the comparison as JSON here.")] = None,
) -> None:
    """Is B better than A? Paired on the same initial states, with an exact test and intervals.

    With --recipe, KEY=VALUE may also set compare.alpha, compare.max_pairs, compare.min_gain and so on.
    """
    if recipe is not None:
        _compare_by_running(recipe, a, b, overrides or [])
        return
    from rich.console import Console

    from vla_rl.config import ConfigError
    from vla_rl.evaluation.compare import compare as compare_evaluations
    from vla_rl.evaluation.results import Evaluation
    from vla_rl.workflows.commands import find_evaluation

    if overrides:
        raise ConfigError(f"compare: {overrides[0]!r}: overrides need --recipe; without it nothing is run")
    first = Evaluation.load(find_evaluation(Path(a), "final" if b else "base"))
    comparison = compare_evaluations(first, Evaluation.load(find_evaluation(Path(b or a), "final")))
    Console().print(comparison.table())
    for warning in comparison.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if output:
        comparison.save(output)


def _compare_by_running(recipe: str, a: str, b: str | None, overrides: list[str]) -> None:
    from vla_rl.config import ConfigError, apply_overrides, validate
    from vla_rl.evaluation.compare import SequentialConfig
    from vla_rl.workflows.commands import compare_policies

    if b is None:
        raise ConfigError("compare: --recipe runs two policies; give both folders, A and B")
    own = [text for text in overrides if text.startswith("compare.")]
    options = apply_overrides({}, own).get("compare", {})
    config = validate(SequentialConfig, options, prefix="compare")
    loaded = _load(recipe, [text for text in overrides if text not in own])
    typer.echo(compare_policies(loaded, a, b, config).text())


@app.command()
def ablate(
    recipe: RecipeName,
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of the recipe and of each control; at least 3 to claim.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of all runs, by default runs/NAME-ablation; goes on.")
    ] = None,
) -> None:
    """Is the gain due to RL? The recipe and its negative controls, several seeds each, in one table."""
    from rich.console import Console

    from vla_rl.workflows.ablate import ablate as run_ablation

    loaded = _load(recipe, overrides)
    folder = output or Path("runs") / f"{loaded.name}-ablation"
    first = loaded.seed
    try:
        result = run_ablation(recipe, loaded, overrides or [], folder, seeds=range(first, first + seeds), jobs=jobs)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. Finished runs are kept in {folder}; the same command goes on from there.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    Console().print(result.table())
    typer.echo(f"written: {folder / 'ablation.json'}")


@app.command()
def demo(
    overrides: Overrides = None,
    output: Output = None,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Policy and (weaker) world model anew.")] = False,
) -> None:
    """The whole loop on the built-in tabletop: real episodes, world model, RL in imagination, the truth, a report."""
    from vla_rl.workflows.demo import demo as run_demo

    typer.echo(f"report: {run_demo(overrides or [], output, from_scratch)}")


@app.command()
def loop(recipe: RecipeName, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Real episodes, a world model fitted on them, its trust, RL in imagination, and the truth."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.workflows.closed_loop import loop as run_loop

    loaded = _load(recipe, overrides)
    folder = open_run(loaded, output, resume)
    with _resumable("loop", recipe, overrides, folder):
        last = run_loop(loaded, folder, lambda text: typer.echo(text, err=True))
    typer.echo(f"policy: {last.run / 'policy'}\nreport: {folder / 'report.html'}")


# Of a fit that is resumed: what only its threshold, chosen last, depends on, and what is collected for it. Datasets
# that are there already were collected as the recipe says, or are refused.
FREE_IN_A_FIT = ("datasets", *(f"world_model.{name}" for name in ("calibrate_on", "max_false_success", "min_failures")))


@world_model_app.command()
def fit(recipe: RecipeName, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Fit a world model: autoencoder, dynamics, success head and classifier, and their threshold."""
    from vla_rl.common.run_folder import open_run
    from vla_rl.workflows.commands import fit_world_model

    loaded = _load(recipe, overrides)
    folder = open_run(loaded, output, resume, free=FREE_IN_A_FIT)
    with _resumable("world-model fit", recipe, overrides, folder):
        typer.echo(f"world model: {fit_world_model(loaded, folder)}")


@world_model_app.command(name="eval")
def evaluate_world_model(
    recipe: RecipeName,
    world_model: Annotated[str, typer.Argument(metavar="WORLD_MODEL", help="A world model's folder.")],
    held_out: Annotated[
        list[Path], typer.Option("--held-out", help="Dataset of real episodes of the policy, none of them fitted on.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Compare real with imagined success; give six or more."),
    ] = None,
    train: Annotated[
        list[Path] | None,
        typer.Option("--train", help="Dataset for the inverse dynamics, such as one it was fitted on."),
    ] = None,
    style: Annotated[
        list[str] | None, typer.Option("--style", help="NAME=DATASET of real episodes with another look.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report; if not given, the world model's.")
    ] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="key=value on the recipe.")] = None,
) -> None:
    """Measure how far a world model can be trusted: trust.json and trust.html."""
    from vla_rl.workflows.commands import measure_world_model

    styles = {name: Path(path) for name, _, path in (text.partition("=") for text in style or ())}
    loaded, data = _load(recipe, override), (held_out, policy or (), train or ())
    page = measure_world_model(loaded, Path(world_model), *data, styles, output)
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="env: steps/s of each simulator; robot: the control loop.")
    ] = "env",
) -> None:
    """Measure speed on this machine. Further arguments go to the benchmark (`vla-rl bench env -- --help`)."""
    from vla_rl.config import ConfigError

    modules = {"env": "sim.bench", "robot": "real_robot.control.bench"}
    if what not in modules:
        raise ConfigError(f"bench: got {what!r}, allowed: {', '.join(modules)}")
    raise typer.Exit(importlib.import_module(modules[what]).main(context.args))


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
    from vla_rl.workflows.doctor import read_recipe, report, run_checks

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

    from vla_rl.recipe.schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=1))


cli_checkpoints.register(app)
cli_serve.register(app)
cli_robot.register(app)
cli_rac.register(app)
cli_failure.register(app)


def main() -> None:
    """The `vla-rl` program. Recipes may name classes of the current folder: last in the path, it hides no package."""
    sys.path.append(os.getcwd())
    app()
