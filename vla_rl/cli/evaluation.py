"""Commands that say how good a policy is: `eval`, `compare`, `report` and `status`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, RecipeName, check_writable, joined, load, say


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command(name="eval")(evaluate)
    app.command()(compare)
    app.command()(report)
    app.command()(status)


def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Output = None,
    name: Annotated[str, typer.Option(help="What is evaluated, for tables and file names.")] = "policy",
    perturb: Annotated[
        str | None, typer.Option(metavar="AXES", help="Also perturbed: all, or some, as in camera,light,wording.")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Of the perturbations: 1 slight, 2 clear, 3 hard; all, unless given.")
    ] = None,
    suites: Annotated[
        str | None,
        typer.Option(metavar="SUITES", help="One table of several: all, or some, as in libero_goal=POLICY,libero_10."),
    ] = None,
) -> None:
    """Evaluate a policy: success per task with its interval, JSON, a picture and videos."""
    from vla_rl.common.run_folder import RunFolder, open_run
    from vla_rl.common.tables import print_table
    from vla_rl.config import ConfigError
    from vla_rl.recipe.checks import EVAL
    from vla_rl.workflows.evaluate_policy import evaluate as run_evaluation
    from vla_rl.workflows.perturbed import chosen, evaluate_perturbed

    if not name or name.startswith(".") or "/" in name:
        raise ConfigError(
            f"--name: got {name!r}; it names files: give a word, such as policy, without '/' or a first dot"
        )
    if levels is not None and perturb is None:
        raise ConfigError(f"--levels: got {levels!r} without --perturb, whose levels they are; name its axes, or all")
    if suites is not None:
        if perturb is not None:
            raise ConfigError("eval: got --suites and --perturb; run one after the other, each with its own --output")
        _evaluate_suites(recipe, overrides, output, name, suites)
        return
    loaded, robustness = load(recipe, overrides, EVAL), None
    perturbations = [] if perturb is None else chosen(loaded, perturb, levels or "1,2,3")
    # A folder that holds the same recipe takes another evaluation, or one that was cut off.
    again = output is not None and RunFolder(output).exists
    if output is not None and RunFolder(output).evaluation(name).exists() and not perturbations:
        raise ConfigError(f"{output} already holds an evaluation {name!r}; choose another --name or --output")
    with joined(loaded) as world:
        run = RunFolder(Path(world.broadcast_from_main(lambda: str(open_run(loaded, output, resume=again)))))
        if perturbations:
            evaluation, robustness = evaluate_perturbed(loaded, run.path, name, perturbations, say)
        else:
            evaluation = run_evaluation(loaded, run.path, name)
    if world.is_main:
        print_table(evaluation.table())
        if robustness is not None:
            print_table(robustness.table())
            typer.echo(f"written: {run.robustness} and .png")
        typer.echo(f"written: {run.evaluation(name)}\nreport: {run.report}")


def _evaluate_suites(recipe: str, overrides: list[str] | None, output: Path | None, name: str, suites: str) -> None:
    from vla_rl.common.run_folder import RunFolder, open_run
    from vla_rl.common.tables import print_table
    from vla_rl.recipe.checks import ANY
    from vla_rl.workflows.suites import evaluate_suites, suite_recipes

    loaded = load(recipe, overrides, ANY)
    recipes = suite_recipes(loaded, suites)
    again = output is not None and RunFolder(output).exists
    with joined(loaded) as world:
        run = RunFolder(Path(world.broadcast_from_main(lambda: str(open_run(loaded, output, resume=again)))))
        results = evaluate_suites(recipes, run.path, name, say)
    if world.is_main:
        print_table(results.table())
        typer.echo(f"written: {run.suites}, .md and .tex\nreport: {run.report}")


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
    check_writable(output)
    if recipe is not None:
        _compare_by_running(recipe, a, b, overrides or [], output)
        return
    from vla_rl.common.tables import print_table
    from vla_rl.config import ConfigError
    from vla_rl.evaluation.compare import compare as compare_evaluations
    from vla_rl.evaluation.results import Evaluation
    from vla_rl.workflows.evaluate_policy import base_and_final, find_evaluation

    if overrides:
        raise ConfigError(f"compare: {overrides[0]!r}: overrides need --recipe; without it nothing is run")
    first, second = [find_evaluation(Path(path), "final") for path in (a, b)] if b else base_and_final(Path(a))
    comparison = compare_evaluations(Evaluation.load(first), Evaluation.load(second))
    print_table(comparison.table())
    for warning in comparison.warnings:
        say(f"warning: {warning}")
    if output:
        comparison.save(output)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder; the run may still be going on.")],
    title: Annotated[str | None, typer.Option(help="Of the page; by default the recipe's name.")] = None,
) -> None:
    """Write a run's report.html anew: during the run, after it, or of one that was stopped."""
    from vla_rl.common.run_folder import RunFolder
    from vla_rl.common.run_status import read_status
    from vla_rl.config import ConfigError
    from vla_rl.report.report import write_report

    run = RunFolder(folder)
    if not run.exists:
        raise ConfigError(f"{folder}: holds no run (no config.yaml); name the folder that the run printed after `run:`")
    with suppress(ConfigError):  # Of a status that cannot be read the page tells.
        if (status := read_status(run.status)) is not None and status.text():
            typer.echo(status.text())
    typer.echo(f"report: {write_report(folder, title)}")


def status(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder; the run may still be going on.")],
) -> None:
    """Say where a run is, what it is busy with, and what its rollouts lost and redid."""
    from vla_rl.common.run_folder import RunFolder
    from vla_rl.config import ConfigError
    from vla_rl.report.status import status_lines

    run = RunFolder(folder)
    if not run.exists:
        raise ConfigError(f"{folder}: holds no run (no config.yaml); name the folder that the run printed after `run:`")
    for line in status_lines(run):
        typer.echo(line)


def _compare_by_running(recipe: str, a: str, b: str | None, overrides: list[str], output: Path | None) -> None:
    from vla_rl.config import ConfigError, apply_overrides, validate
    from vla_rl.evaluation.sequential_compare import SequentialConfig
    from vla_rl.recipe.checks import ANY
    from vla_rl.workflows.evaluate_policy import compare_policies, save_comparison

    if b is None:
        raise ConfigError("compare: --recipe runs two policies; give both folders, A and B")
    own = [text for text in overrides if text.startswith("compare.")]
    options = apply_overrides({}, own).get("compare", {})
    config = validate(SequentialConfig, options, prefix="compare")
    loaded = load(recipe, [text for text in overrides if text not in own], ANY)
    comparison = compare_policies(loaded, a, b, config)
    typer.echo(comparison.text())
    if output:
        save_comparison(output, comparison, loaded, a, b, config)
