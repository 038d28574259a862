"""`vla-rl eval R --perturb all`: evaluation under perturbations, axis by axis and level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from vla_rl.common.distributed.process_group import current
from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, build_env, policy_hash
from vla_rl.evaluation.evaluate import evaluate as run_evaluation
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.robustness import Robustness
from vla_rl.evaluation.video import write_episode_video
from vla_rl.interfaces import EnvConfig, Policy
from vla_rl.recipe.recipe import Recipe
from vla_rl.rollout.runner import collect
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.evaluate_policy import evaluate
from vla_rl.workflows.recipe_parts import build_policy, policy_path

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
    return evaluation
