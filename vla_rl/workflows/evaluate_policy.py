"""`vla-rl eval` and `vla-rl compare`: how good a saved policy is, and which of two is better."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import ALONE, current, resolve_device
from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import build_env, policy_hash
from vla_rl.evaluation.evaluate import evaluate as run_evaluation
from vla_rl.evaluation.foreign import file_of
from vla_rl.evaluation.journal import EpisodeJournal, journals
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.sequential_compare import SequentialComparison, SequentialConfig, compare_sequential
from vla_rl.evaluation.verdict import Verdict
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.checks import EVAL, check
from vla_rl.recipe.recipe import Recipe
from vla_rl.training.metrics import WandbRun
from vla_rl.workflows.jobs import BASE, FINAL
from vla_rl.workflows.recipe_parts import build_policy, env_spec, policy_path


def evaluate(recipe: Recipe, folder: Path, name: str = "policy") -> Evaluation:
    """Evaluate the recipe's policy; writes evaluations/NAME.json and .png, videos/ and report.html.

    With `log.wandb` it is shown there too, the folder as a run. Several processes share the episodes; the first one
    writes, before anything is filmed, and each makes its videos.
    """
    check(recipe, EVAL)
    run = RunFolder(folder)
    policy, world = build_policy(recipe, env_spec(recipe)), current()

    def save(evaluation: Evaluation) -> None:
        if world.is_main:
            evaluation.save(run.evaluation(name))
            evaluation.plot(run.evaluation(name).with_suffix(".png"))

    evaluation = run_evaluation(
        policy,
        recipe.rollout.placed(recipe.acting_env),
        recipe.eval,
        name=name,
        policy_path=policy_path(recipe),
        video_folder=run.videos,
        progress=partial(episode_progress, show=world.is_main),
        on_result=save,
        file=run.evaluation(name),
        world=world,
    )
    world.wait()  # The others' videos belong in the report.
    if world.is_main:
        write_report(folder, after=name)
        if recipe.log.wandb != "disabled":
            with closing(WandbRun(folder, recipe.log, recipe.model_dump(mode="json"))) as shown:
                shown.log_evaluation(0, evaluation, run.videos_of(name))
    return evaluation


def find_evaluation(path: Path, preferred: str) -> Path:
    """An evaluation's JSON file: the path itself, or in a run's folder the `preferred` one, else the only one.

    Raises:
        ConfigError: no such path, or a folder without evaluations or with several others.
    """
    if file_of(path)[0].is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder. Give an evaluation's JSON file, or a run's folder.")
    run = RunFolder(path)
    found = sorted(run.evaluations.glob("*.json"))
    if not found and run.exists:
        raise ConfigError(f"{path}: this run has no evaluation so far; `vla-rl eval` makes one of a policy.")
    if not found and path.name == run.policy.name and RunFolder(path.parent).exists:
        raise ConfigError(
            f"{path}: a policy, which holds no evaluation. Give the run's folder, {path.parent}; or add --recipe "
            "RECIPE, which runs the policies A and B."
        )
    found = found or sorted(path.glob("*.json"))
    for file in found:
        if file.stem == preferred or len(found) == 1:
            return file
    names = ", ".join(file.name for file in found) or "none"
    raise ConfigError(f"{path}: which evaluation? It has: {names}. Name the file itself.")


def base_and_final(path: Path) -> tuple[Path, Path]:
    """The JSON files of a run's evaluations before and after.

    Raises:
        ConfigError: no such folder, or one that lacks either.
    """
    if path.is_file() or not path.exists():
        find_evaluation(path, BASE)  # Refuses what is not there.
        raise ConfigError(f"compare: {path} is one evaluation; name another to compare it with: A B")
    run = RunFolder(path)
    if lacking := [repr(name) for name in (BASE, FINAL) if not run.evaluation(name).is_file()]:
        there = ", ".join(file.name for file in sorted(run.evaluations.glob("*.json"))) or "none"
        raise ConfigError(
            f"compare: {path} has no evaluation {' or '.join(lacking)} so far (it has: {there}). "
            "Wait for the run's end, or resume it; a run that does not evaluate before and after needs two paths, A B"
        )
    return run.evaluation(BASE), run.evaluation(FINAL)


def compare_policies(
    recipe: Recipe, a: str, b: str, config: SequentialConfig, file: Path | None = None
) -> SequentialComparison:
    """Run two saved policies in the recipe's environment until the difference is clear.

    Args:
        file: of the result; until it is there, each batch is kept beside it, and is not run again.

    Raises:
        EvaluationError: batches of other policies, environment or options are there.
    """
    device, acting = resolve_device(recipe.device), recipe.rollout.placed(recipe.acting_env)
    first, second = load_policy(a, device), load_policy(b, device)
    with (
        closing(build_env(acting)) as env,
        Console(stderr=True).status("comparing") as status,
    ):
        subject = {
            "policies": [policy_hash(resolve_path(path)) for path in (a, b)],
            "compare": config.model_dump(mode="json"),
            "env": acting.model_dump(mode="json", exclude={"num_workers"}),
            "num_episodes": 2 * config.max_pairs,
        }
        with EpisodeJournal(file, subject, ALONE) as journal:
            return compare_sequential(
                *(first, second, env, config),
                lambda pairs, p: status.update(f"{pairs} pairs, anytime-valid p {p:.3g}"),
                journal=journal,
            )


def save_comparison(
    file: Path,
    comparison: SequentialComparison,
    recipe: Recipe,
    a: str,
    b: str,
    config: SequentialConfig,
    said: Verdict,
) -> None:
    """Write as JSON, atomically, how two policies compared, which they were, and how and where they were run."""
    made = {"a": a, "b": b, "compare": config.model_dump(mode="json"), "env": recipe.acting_env.model_dump(mode="json")}
    made["verdict"] = said.model_dump(mode="json")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(comparison.model_dump(mode="json") | made, indent=1) + "\n")
    for journal in journals(file):
        journal.unlink()
