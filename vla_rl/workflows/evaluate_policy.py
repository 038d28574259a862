"""`vla-rl eval` and `vla-rl compare`: how good a saved policy is, on suites of tasks too; which of two is better.

Where nothing answers an action, a policy is held against recorded episodes that it has not learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import ALONE, current, resolve_device
from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder, command_line
from vla_rl.config import ConfigError, read_yaml
from vla_rl.evaluation.evaluate import EvalConfig, build_env, policy_hash
from vla_rl.evaluation.evaluate import evaluate as run_evaluation
from vla_rl.evaluation.foreign import file_of
from vla_rl.evaluation.recorded import ActionErrors, action_errors, predict, write_page
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import EpisodeJournal, Evaluation, journals
from vla_rl.evaluation.robustness import Robustness
from vla_rl.evaluation.sequential_compare import SequentialComparison, SequentialConfig, compare_sequential
from vla_rl.evaluation.suites import SuiteResults
from vla_rl.evaluation.verdict import Verdict
from vla_rl.evaluation.video import write_episode_video
from vla_rl.interfaces import EnvConfig, Policy
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.checks import EVAL, held_out_of
from vla_rl.recipe.recipe import Recipe, check
from vla_rl.rollout.runner import collect
from vla_rl.training.bc_trainer import open_bc_dataset
from vla_rl.training.config import SFTConfig
from vla_rl.training.metrics import WandbRun
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.jobs import BASE, FINAL
from vla_rl.workflows.recipe_parts import build_policy, env_spec, policy_path


def evaluate(recipe: Recipe, folder: Path, name: str = "policy") -> Evaluation:
    """Evaluate the recipe's policy; writes evaluations/NAME.json, videos/ and report.html.

    With `log.wandb` it is shown there too, the folder as a run. Several processes share the episodes; the first one
    writes, before anything is filmed, and each makes its videos.
    """
    check(recipe, EVAL)
    run = RunFolder(folder)
    policy, world = build_policy(recipe, env_spec(recipe)), current()

    def save(evaluation: Evaluation) -> None:
        if world.is_main:
            evaluation.save(run.evaluation(name))

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


LEVELS = (1, 2, 3)


def chosen(recipe: Recipe, axes: str, levels: str) -> list[tuple[str, int]]:
    """The axes and levels that a command names, each axis at each level; "all" is every axis of the environment.

    Raises:
        ConfigError: one that the environment does not have, or an environment that is perturbed already.
    """
    env: EnvConfig = recipe.acting_env
    known = env.perturb_axes
    wanted = list(known) if axes == "all" else axes.split(",")
    if not known:
        raise ConfigError(f"--perturb: {env.kind} has no perturbations; tabletop and libero have")
    if already := getattr(env, "perturb", None):
        section = "env" if recipe.real_env is None else "real_env"
        raise ConfigError(
            f"{section}.perturb: got {already.axis}-{already.level} with --perturb, whose clean episodes have none; "
            f"set {section}.perturb=null"
        )
    if unknown := [axis for axis in wanted if axis not in known]:
        raise ConfigError(f"--perturb: got {unknown[0]!r}; {env.kind} has: {', '.join(known)}, or all")
    numbers = levels.split(",")
    if unknown := [number for number in numbers if number not in map(str, LEVELS)]:
        raise ConfigError(f"--levels: got {unknown[0]!r}; levels are 1, 2 and 3, as in --levels 1,3")
    return [(axis, int(number)) for axis in dict.fromkeys(wanted) for number in sorted(set(numbers))]


def evaluate_perturbed(
    recipe: Recipe, folder: Path, name: str, perturbations: Sequence[tuple[str, int]], show: Callable[[str], None]
) -> tuple[Evaluation, Robustness]:
    """Evaluate the recipe's policy perturbed, then clean from the same initial states.

    Writes perturbed/AXIS-LEVEL.json, robustness.json and .png beside what `evaluate` writes, and where that films, a
    video of each axis at its highest level. What a cut-off call has finished is not run again.
    """
    run, world = RunFolder(folder), current()
    found: dict[tuple[str, int], Evaluation] = {}
    policy = build_policy(recipe, recipe.acting_env.env_spec())
    config = recipe.eval.model_copy(update={"videos": 0})
    for number, (axis, level) in enumerate(perturbations, 1):
        path = run.perturbed / f"{axis}-{level}.json"
        if (done := finished(path, config, policy_path(recipe))) is not None:
            found[axis, level] = done
            continue
        env = recipe.acting_env.perturbed(axis, level)
        if world.is_main:
            show(f"{number} of {len(perturbations)}: {axis}, level {level}")
        found[axis, level] = run_evaluation(
            policy,
            recipe.rollout.placed(env),
            config,
            name=f"{axis}-{level}",
            policy_path=policy_path(recipe),
            progress=partial(episode_progress, show=world.is_main),
            on_result=lambda found, path=path: found.save(path) if world.is_main else None,
            file=path,
            world=world,
        )
        if recipe.eval.videos and world.is_main and (axis, level) == max(p for p in perturbations if p[0] == axis):
            _film(policy, env, found[axis, level], config, path.with_suffix(".mp4"))
    done = finished(run.evaluation(name), recipe.eval, policy_path(recipe))
    world.wait()  # Nobody writes that file before all have looked.
    clean = done or evaluate(recipe, folder, name)
    robustness = Robustness.of(clean, found)
    if world.is_main:
        robustness.save(run.robustness)
        robustness.plot(run.robustness.with_suffix(".png"))
        write_report(folder, after=name)  # Again: now with the perturbed rows.
    return clean, robustness


def _film(policy: Policy, env: EnvConfig, evaluation: Evaluation, config: EvalConfig, file: Path) -> None:
    """Write a video of one episode from the first initial state, drawn as in the last mode."""
    first, temperature = evaluation.episodes[0], [*config.modes().values()][-1]
    with closing(build_env(env, 1, record_frames=True)) as built:
        spec = EpisodeSpec(first.task, first.split, first.index)
        (episode,) = collect(policy, built, [spec], temperature=temperature, seed=config.seed)
        if not episode.lost:
            write_episode_video(file, episode, built.spec.control_hz)


def finished(path: Path, config: EvalConfig, policy: Path | None) -> Evaluation | None:
    """What an earlier call wrote, if it is of the same episodes and weights; None where there is nothing.

    Journals that a kill has left beside it are deleted.

    Raises:
        ConfigError: it is of others.
    """
    if not path.is_file():
        return None
    evaluation = Evaluation.load(path)
    if evaluation.meta.config != config.model_dump(mode="json"):
        raise ConfigError(f"{path}: of other eval options; choose another --output, or delete it")
    if policy is not None and evaluation.meta.policy_hash != policy_hash(policy):
        raise ConfigError(f"{path}: of other weights than {policy} has now; choose another --output, or delete it")
    for left in journals(path):
        left.unlink(missing_ok=True)
    return evaluation


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


def evaluate_recorded(
    recipe: Recipe, folder: Path, name: str, show: Callable[[str], None] = lambda _: None
) -> ActionErrors:
    """Measure the recipe's policy on held-out episodes; writes action_errors/NAME.json and NAME/report.html.

    Raises:
        ConfigError: no episodes are held out, or the policy is known to have learned from them.
        DatasetError: a dataset is missing, damaged or does not fit.
    """
    check(recipe, EVAL)
    if current().size > 1:
        raise ConfigError("eval: action errors are measured in one process; start it without a launcher")
    datasets, fraction = held_out_of(recipe)
    path, spec = policy_path(recipe), env_spec(recipe)
    unseen = _unseen(recipe, path, [one.path for one in datasets], fraction)
    policy = build_policy(recipe, spec)
    sft: SFTConfig = getattr(recipe, "sft", None) or SFTConfig(datasets=tuple(datasets))
    data = open_bc_dataset(sft.model_copy(update={"datasets": tuple(datasets)}), policy, spec)
    if fraction < 1:
        data = data.hold_out(fraction, recipe.seed)[1]
    tracks = predict(
        policy,
        data.parts,
        recipe.eval.episodes_per_task,
        recipe.eval.seed,
        lambda done, total: show(f"episode {done + 1} of {total}"),
    )
    result, tracks = action_errors(
        tracks,
        data.parts[0].action_names,
        name=name,
        policy=f"fresh, seed {recipe.seed}" if path is None else str(path),
        policy_hash="" if path is None else policy_hash(path),
        datasets=tuple(one.path for one in datasets),
        unseen=unseen,
        control_hz=spec.control_hz,
    )
    run = RunFolder(folder)
    file = run.action_errors_of(name)
    result.save(file)
    write_page(result, tracks, file.with_suffix("") / run.report.name, command_line())
    return result


def _unseen(recipe: Recipe, policy: Path | None, paths: Sequence[str], fraction: float) -> str:
    """Why a policy has not learned from what is held out; "" where its folder does not say how it was made.

    Raises:
        ConfigError: its run's own recipe says that it has.
    """
    if policy is None:
        return "The policy is fresh: it has learned nothing."
    file = RunFolder(policy.parent).config
    made: Mapping[str, Any] = read_yaml(file) if file.is_file() else {}
    learned = made.get("sft") or {}
    known = [str(one["path"]) for one in learned.get("datasets") or () if isinstance(one, Mapping) and "path" in one]
    if not known:
        return ""
    if fraction == 1:
        if both := [path for path in paths if _resolved(path) in map(_resolved, known)]:
            raise ConfigError(
                f"eval.datasets: {both[0]} is one of the datasets that {policy} was cloned from ({file}); name "
                "recordings that it has not learned, or clone with sft.validation_fraction and leave eval.datasets out"
            )
        return "None of these datasets is among those that the policy was cloned from."
    own = {
        "seed": (made.get("seed"), recipe.seed),
        "sft.validation_fraction": (learned.get("validation_fraction"), fraction),
        "sft.datasets": ([*map(_resolved, known)], [*map(_resolved, paths)]),
    }
    for option, (then, now) in own.items():
        if then != now:
            raise ConfigError(
                f"{option}: got {now}, and {policy} was cloned with {then} ({file}): the episodes held out here are "
                "not those that were held out there. Use the same, or name others in eval.datasets"
            )
    return "They were held out when the policy was cloned."


def _resolved(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if Path(path).expanduser().is_dir() else path
