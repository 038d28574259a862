"""Commands that run a policy's episodes, or compare them: `collect`, `eval`, `compare`."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, RecipeName, Resume, check_writable, say, stopped
from vla_rl.cli.running import load, load_run, opened_run
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.common.tables import print_table
from vla_rl.config import apply_overrides, read_yaml, validate
from vla_rl.evaluation.compare import format_p
from vla_rl.evaluation.foreign import compare_any, is_foreign, read_evaluation
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.sequential_compare import SequentialConfig
from vla_rl.evaluation.suites import dimension_table
from vla_rl.evaluation.verdict import MARGIN, Verdict, changed_tasks, verdict
from vla_rl.recipe.checks import COLLECT, EVAL
from vla_rl.recipe.recipe import ANY, Recipe, check
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.workflows.collect import collect as run_collect
from vla_rl.workflows.evaluate_policy import (
    base_and_final,
    chosen,
    compare_policies,
    evaluate_perturbed,
    evaluate_recorded,
    evaluate_suites,
    find_evaluation,
    save_comparison,
    suite_recipes,
)
from vla_rl.workflows.evaluate_policy import evaluate as run_evaluation
from vla_rl.workflows.recipe_parts import policy_path

app = typer.Typer()


@app.command()
def collect(
    recipe: RecipeName,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The dataset's folder (collect.dataset).")
    ] = None,
) -> None:
    """Write a LeRobotDataset: the scripted expert's demonstrations, or a policy's episodes."""
    check_writable(output)
    loaded = load(recipe, [*(overrides or ()), *([f"collect.dataset={output}"] if output else [])], COLLECT)
    config = loaded.collect or CollectConfig.model_validate({})
    try:
        summary = run_collect(loaded, config, say)
    except KeyboardInterrupt:
        raise stopped("Finished episodes are kept; the same command resumes there.") from None
    typer.echo(f"dataset: {summary['dataset']}  ({summary['episodes']} episodes, {summary['frames']} frames)")
    for task, rate in summary["success_rate"].items():
        typer.echo(f"  {task}: {100 * rate:.0f} % success")
    sft = getattr(loaded, "sft", None)
    is_cloned = sft is not None and summary["dataset"] in [str(dataset.path) for dataset in sft.datasets]
    typer.echo(next_command(*(["sft", recipe, *(overrides or ())] if is_cloned else ["report", summary["dataset"]])))


@app.command("eval")
def evaluate(
    recipe: OwnRecipe = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Resume = False,
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
    """Evaluate a policy: success per task with its interval, JSON, a picture and videos.

    With env.kind robot, where nothing can succeed: action errors on held-out recorded episodes, JSON and a page.
    Each episode is kept as it ends: after Ctrl-C or a kill, the same command with --resume goes on where it was.
    """
    if not name or name.startswith(".") or "/" in name:
        raise ConfigError(
            f"--name: got {name!r}; it names files: give a word, such as policy, without '/' or a first dot"
        )
    if levels is not None and perturb is None:
        raise ConfigError(f"--levels: got {levels!r} without --perturb, whose levels they are; name its axes, or all")
    if suites is not None and perturb is not None:
        raise ConfigError("eval: got --suites and --perturb; run one after the other, each with its own --output")
    loaded = check(load_run(recipe, overrides, output, resume), EVAL if suites is None else ANY)
    perturbations = [] if perturb is None else chosen(loaded, perturb, levels or "1,2,3")
    recipes = {} if suites is None else suite_recipes(loaded, suites)
    # A folder that holds the same recipe takes another evaluation, or goes on with one that was cut off.
    again = resume or (output is not None and RunFolder(output).exists)
    is_alone = not perturbations and not recipes
    taken = (RunFolder(output).evaluation(name), RunFolder(output).action_errors_of(name)) if output else ()
    if is_alone and any(file.exists() for file in taken):
        raise ConfigError(f"{output} already holds an evaluation {name!r}; choose another --name or --output")
    given = {"--name": name, "--perturb": perturb, "--levels": levels, "--suites": suites}
    typed = shlex.join(["eval", *(word for pair in given.items() if pair[1] is not None for word in pair)])
    with opened_run(loaded, typed, partial(open_run, loaded, output, resume=again)) as (world, folder):
        run = RunFolder(folder)
        if recipes:
            results, written = evaluate_suites(recipes, run.path, name, say), f"{run.suites}, .md and .tex"
            each = [Evaluation.load(run.evaluation(one)) for one in results.evaluations.values()]
            tables = [results.table(), *([dimension_table(each)] if each[0].meta.groups else [])]
        elif perturbations:
            evaluation, robustness = evaluate_perturbed(loaded, run.path, name, perturbations, say)
            tables, written = [evaluation.table(), robustness.table()], f"{run.robustness} and .png"
        elif loaded.acting_env.not_stepped:
            tables = [evaluate_recorded(loaded, run.path, name, say).table()]
            written = str(run.action_errors_of(name))
            if not run.metrics.is_file():  # The page of a run that learned is its own, and links to this one.
                shutil.copyfile(run.action_errors_of(name).with_suffix("") / run.report.name, run.report)
            else:
                write_report(run.path)
        else:
            evaluation, written = run_evaluation(loaded, run.path, name), str(run.evaluation(name))
            tables = [dimension_table([evaluation]) if evaluation.meta.groups else evaluation.table()]
    if world.is_main:
        for table in tables:
            print_table(table)
        typer.echo(f"written: {written}\nreport: {run.report}")
        typer.echo(_after_evaluation(loaded, [word for word in (recipe, *(overrides or ())) if word], run))


def _after_evaluation(loaded: Recipe, typed: Sequence[str], run: RunFolder) -> str:
    """The line of what comes next: RL of a policy that it has not made; else what compares it with before."""
    path = policy_path(loaded)
    if loaded.acting_env.not_stepped:
        return next_command("serve", path)
    made_by = RunFolder(path.parent).config if path else Path()
    is_fresh = not made_by.is_file() or read_yaml(made_by).get("run") in ("eval", "sft")
    if loaded.run == "train" and is_fresh:
        return next_command("train", *(typed or [run.config]))
    return next_command("compare", "BEFORE", run.path, what="is it better")


@app.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run's folder, or an evaluation's file, also another program's.")
    ],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another. Without it: base and final of run A.")
    ] = None,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Run policies A and B (folders) in this recipe's environment; stops when clear.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="The smallest difference that matters, in points; the exit code tells then."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the comparison as JSON here.")] = None,
) -> None:
    """Is B better than A? Paired on the same initial states, with an exact test, intervals and a verdict.

    Read are also LeRobot's eval_info.json, vla-eval's JSON, logs of RLinf and SimpleVLA-RL, and CSV with a column
    success (and task, state): paired where both name their initial states, else not, and it says which.

    The verdict is better, worse, no difference shown (one of the margin is excluded), or too few episodes, with about
    how many states would tell; the margin is 5 points unless given. With --margin the exit code is 0 for better and for
    no difference shown, 1 for worse in any mode, 3 for too few episodes; 2 is a command that could not run.

    With --recipe, KEY=VALUE may also set compare.alpha, compare.max_pairs, compare.min_gain and so on; with --output
    too, the same command goes on after an interruption.
    """
    check_writable(output)
    fraction = MARGIN if margin is None else margin / 100
    if fraction == 0:
        raise ConfigError("--margin: got 0; give the smallest difference that matters, in points, such as 5")
    if recipe is not None:
        verdicts = [_compare_by_running(recipe, a, b, overrides or [], output, fraction)]
    else:
        verdicts = _compare_files(a, b, overrides or [], output, fraction)
    if margin is not None:
        codes = [verdict.exit_code for verdict in verdicts]
        raise typer.Exit(1 if 1 in codes else max(codes))


def _compare_files(a: str, b: str | None, overrides: list[str], output: Path | None, margin: float) -> list[Verdict]:
    if overrides:
        raise ConfigError(f"compare: {overrides[0]!r}: overrides need --recipe; without it nothing is run")
    files = [find_evaluation(Path(path), "final") for path in (a, b)] if b else base_and_final(Path(a))
    first, second = (read_evaluation(file) for file in files)
    comparison = compare_any(first, second)
    print_table(comparison.table())
    for warning in comparison.warnings:
        say(f"warning: {warning}")
    verdicts = [verdict(comparison.result(mode), margin) for mode in comparison.modes]
    for said in verdicts:
        typer.echo(said.text())
        for result, p_value in changed_tasks(comparison.results, said.mode):
            if result.difference < 0:
                typer.echo(f"  fell, not by chance (p {format_p(p_value)}, Holm): {comparison.label(result)}")
    if output:
        comparison.save(output, verdicts)
    run, policies = RunFolder(files[1].parents[1]), [first.meta.policy, second.meta.policy]
    is_ours = not is_foreign(second) and all(policies)
    if is_ours and run.exists and any(said.states_needed for said in verdicts):
        typer.echo(next_command("compare", *policies, "--recipe", run.config, what="as many episodes as it takes"))
    elif is_ours and {said.word for said in verdicts} <= {"better", "no difference shown"}:
        typer.echo(next_command("serve", policies[1], what="for a robot"))
    else:
        typer.echo(next_command("report", run.path if run.exists else files[1], what="task by task"))
    return verdicts


def _compare_by_running(
    recipe: str, a: str, b: str | None, overrides: list[str], output: Path | None, margin: float
) -> Verdict:
    if b is None:
        raise ConfigError("compare: --recipe runs two policies; give both folders, A and B")
    own = [text for text in overrides if text.startswith("compare.")]
    options = apply_overrides({}, own).get("compare", {})
    config = validate(SequentialConfig, options, prefix="compare")
    changes = [text for text in overrides if text not in own]
    loaded = load(recipe, changes, ANY)
    try:
        comparison = compare_policies(loaded, a, b, config, output)
    except KeyboardInterrupt:
        kept = f"Batches that ended are kept beside {output}" if output else "Nothing is kept; with --output FILE"
        raise stopped(f"{kept}{';' if output else ''} the same command goes on where it was.") from None
    said = verdict(comparison, margin)
    typer.echo(f"{comparison.text()}\n{said.text()}")
    if output:
        save_comparison(output, comparison, loaded, a, b, config, said)
    if said.states_needed:
        more = (*(text for text in own if "max_pairs" not in text), f"compare.max_pairs={said.states_needed}")
        typer.echo(next_command("compare", a, b, "--recipe", recipe, *changes, *more, what="until it tells"))
    elif said.word == "worse":
        typer.echo(next_command("eval", recipe, *changes, f"policy.path={b}", what="where it fails"))
    else:
        typer.echo(next_command("serve", b, what="for a robot"))
    return said
