"""`run: offline`: a policy improved from logged episodes, evaluated before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rl.algorithms.offpolicy.features import FeatureCache
from vla_rl.algorithms.offpolicy.offline import LoggedRun
from vla_rl.common.run_folder import RunFolder
from vla_rl.data.hub import check_datasets
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.verdict import outcome
from vla_rl.interfaces import Policy
from vla_rl.recipe.checks import OFFLINE, demonstrations_of
from vla_rl.recipe.recipe import Recipe, Run, check
from vla_rl.recipe.runs import OfflineRecipe
from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint
from vla_rl.training.metrics import MetricLogger
from vla_rl.workflows.collect import collect
from vla_rl.workflows.evaluate_policy import evaluate, evaluate_recorded
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads, policy_path

BASE, FINAL = "base", "final"


def improve_offline(recipe: OfflineRecipe, folder: Path, show: Callable[[str], None]) -> dict[str, Any]:
    """Improve the recipe's policy from its logged episodes, and evaluate it before and after; resumes where it stopped.

    Raises:
        ConfigError: the recipe has no offline or sft section, or its policy is no checkpoint.
        DatasetError: a dataset is not there.
        ValueError: all logged episodes ended alike, so that there is nothing to learn from.
    """
    check(recipe, OFFLINE)
    limit_threads(recipe)
    run, spec = RunFolder(folder), env_spec(recipe)
    collect_missing(recipe, show)
    section = recipe.offline
    if section.evaluate == "before_and_after":
        evaluate_once(recipe, folder, BASE)
    policy = section.learner(build_policy(recipe, spec))
    with resumed_logger(recipe, folder) as logger:
        cache = feature_cache(recipe, policy, show)
        summary = section.improve(policy, LoggedRun(folder, recipe.sft, recipe.seed, spec, logger.log, show, cache))
    trained = section.finished(policy, run.policy) or recipe.policy.model_copy(update={"path": str(run.policy)})
    if section.evaluate != "never":
        evaluate_once(recipe.model_copy(update={"policy": trained}), folder, FINAL)
    write_report(folder)
    return summary


def resumed_logger(recipe: Recipe, folder: Path) -> MetricLogger:
    """What goes on after the last checkpoint's metrics."""
    run = RunFolder(folder)
    checkpoint = latest_checkpoint(run.checkpoints)
    done = checkpoint_step(checkpoint) if checkpoint else 0 if run.metrics.exists() else None
    return MetricLogger(folder, recipe.log, resume_step=done, run_config=recipe.model_dump(mode="json"))


def collect_missing(recipe: Recipe, show: Callable[[str], None]) -> None:
    """Collect those of the recipe's `datasets` that are not there, and check that `sft.datasets` are.

    Raises:
        DatasetError: one of these is not there.
    """
    for config in recipe.datasets:
        if not Path(config.dataset).is_dir():
            collect(recipe, config, show)
    check_datasets(d.path for d in demonstrations_of(recipe).datasets)


def feature_cache(recipe: Recipe, policy: Policy, show: Callable[[str], None]) -> FeatureCache:
    """Where what the recipe's policy, a checkpoint, makes of datasets is kept; nowhere of one that acts elsewhere."""
    if policy.source is not None:
        return FeatureCache(None, policy.source, show)
    path = policy_path(recipe)
    assert path is not None, "checked before"
    section = recipe.policy.model_dump(mode="json", exclude={"path"})
    return FeatureCache(policy_hash(path), json.dumps(section, sort_keys=True), show)


def evaluate_once(recipe: Recipe, folder: Path, name: str) -> None:
    """Run the recipe's evaluation, unless the run has it."""
    run = RunFolder(folder)
    if recipe.acting_env.not_stepped:
        if not run.action_errors_of(name).is_file():
            evaluate_recorded(recipe, folder, name)
    elif not run.evaluation(name).is_file():
        evaluate(recipe, folder, name)


def _start(recipe: OfflineRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
    improve_offline(recipe, folder, show)
    return outcome(folder)


RUN = Run("train", OFFLINE, _start, datasets=lambda _: ("sft.datasets",))
