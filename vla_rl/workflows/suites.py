"""`vla-rl eval R --suites all`: a benchmark's suites one after another, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vla_rl.common.distributed.process_group import current
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.suites import SuiteResults
from vla_rl.recipe.checks import EVAL, check
from vla_rl.recipe.recipe import Recipe
from vla_rl.workflows.evaluate_policy import evaluate, finished
from vla_rl.workflows.recipe_parts import policy_path


def suite_recipes(recipe: Recipe, suites: str) -> dict[str, Recipe]:
    """The recipe for each suite that a command names: "all", or some, each perhaps with a policy of its own.

    Args:
        suites: as in "libero_spatial,libero_10" or "libero_spatial=FOLDER,libero_goal=ORGANIZATION/NAME".

    Raises:
        ConfigError: a suite that the environment does not have, or what an evaluation there is refused for.
    """
    known = recipe.acting_env.suites
    if not known:
        raise ConfigError(f"--suites: {recipe.acting_env.kind} has no suites; libero has")
    pairs = [text.partition("=") for text in (",".join(known) if suites == "all" else suites).split(",")]
    if unknown := [suite for suite, _, _ in pairs if suite not in known]:
        raise ConfigError(f"--suites: got {unknown[0]!r}; {recipe.acting_env.kind} has: {', '.join(known)}, or all")
    if len({suite for suite, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"--suites: got {suites}; name each suite once")
    found = {suite: _for_suite(recipe, suite, path) for suite, _, path in pairs}
    for one in found.values():
        check(one, EVAL)
    return found


def _for_suite(recipe: Recipe, suite: str, path: str) -> Recipe:
    section = "env" if recipe.real_env is None else "real_env"
    changes: dict[str, object] = {section: getattr(recipe, section).in_suite(suite)}
    if path:
        policy = recipe.policy
        changes["policy"] = type(policy).model_validate({**policy.model_dump(), "path": path})
    return recipe.model_copy(update=changes)


def evaluate_suites(
    recipes: Mapping[str, Recipe], folder: Path, name: str, show: Callable[[str], None]
) -> SuiteResults:
    """Evaluate each suite's recipe as `evaluate` does, as NAME-SUITE; then write suites.json, .md, .tex and the page.

    A suite that a cut-off call has finished is not run again.

    Args:
        recipes: of `suite_recipes`.
    """
    run, world = RunFolder(folder), current()
    found: dict[str, Evaluation] = {}
    for number, (suite, recipe) in enumerate(recipes.items(), 1):
        if world.is_main:
            show(f"{number} of {len(recipes)}: {suite}")
        done = finished(run.evaluation(f"{name}-{suite}"), recipe.eval, policy_path(recipe))
        world.wait()  # Nobody writes that file before all have looked.
        found[suite] = done or evaluate(recipe, folder, f"{name}-{suite}")
    env = next(iter(recipes.values())).acting_env
    usual = [suite for suite in env.averaged_suites if suite in found]
    averages = [list(found)] if len(usual) in (0, len(found)) else [usual, list(found)]
    results = SuiteResults.of(name, found, env.suites, averages)
    if world.is_main:
        results.save(run.suites)
        write_report(folder)
    return results
