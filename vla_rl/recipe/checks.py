"""Checks of a recipe before any work, by its files and by facts of the environment.

Nothing here builds an environment or a policy. Which sections a recipe may have, and how they fit together, is said by
its class (`runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.common.run_folder import Changed, RunFolder
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset_check import check_datasets
from vla_rl.evaluation.evaluate import EvalConfig, episode_specs
from vla_rl.interfaces import EnvConfig
from vla_rl.policies.base import checkpoint_folder
from vla_rl.recipe.recipe import Recipe
from vla_rl.recipe.runs import (
    FailureRecipe,
    FitRecipe,
    HilRecipe,
    HubRecipe,
    LoopRecipe,
    OfflineRecipe,
    OnlineRecipe,
    RacRecipe,
    RewardRecipe,
    TrainRecipe,
)
from vla_rl.training.config import SFTConfig

# Options of an evaluation that action errors on recordings have no use for.
_OF_SUCCESS = ("split", "tasks", "start_index", "temperatures", "samples_per_state", "videos", "plan")


@dataclass(frozen=True)
class Command[R: Recipe]:
    """What a command asks of a recipe.

    Attributes:
        kind: of run that it is for. example: a shipped recipe that is one. looks: raise where something that the recipe
            names is not there.
    """

    kind: type[R]
    example: str = ""
    looks: tuple[Callable[[R], object], ...] = ()


@dataclass(frozen=True)
class Run[R: Recipe]:
    """What is a kind of run's own; `vla_rl.cli.running.run` does the rest.

    Attributes:
        name: as it is typed behind `vla-rl`.
        command: which recipes it takes.
        start: runs it in its folder, resumed or not, saying what it does, and returns lines to print at its end.
        datasets: `SECTION.FIELD`s of datasets that it reads; those of the Hub are taken by their commit.
        free: patterns of options that may change where it is resumed, such as its length.
        look: raises where something is amiss, before anything is written.
        check_changes: see `open_run`.
    """

    name: str
    command: Command[R]
    start: Callable[[R, Path, bool, Callable[[str], None]], Sequence[str]]
    datasets: Callable[[R], Sequence[str]] = lambda _: ()
    free: tuple[str, ...] = ()
    look: Callable[[R], object] = lambda _: None
    check_changes: Callable[[R], Callable[[RunFolder, Changed], None] | None] = lambda _: None


def check[R: Recipe](recipe: Recipe, command: Command[R]) -> R:
    """Refuse what would fail later, perhaps after hours; return the recipe, of the kind that the command runs.

    Raises:
        ConfigError: it is of a kind that the command cannot run, or something that it names is not there.
    """
    if not isinstance(recipe, command.kind):
        wanted = command.kind.model_fields["run"].default
        raise ConfigError(
            f"run: got {recipe.run!r}, and this command is for recipes of run {wanted!r}; "
            f"`vla-rl config {command.example}` is one"
        )
    for look in command.looks:
        look(recipe)
    return recipe


def demonstrations_of(recipe: Recipe) -> SFTConfig:
    """Return the recipe's section of behavior cloning.

    Raises:
        ConfigError: it has none.
    """
    sft = getattr(recipe, "sft", None)
    if sft is None:
        raise ConfigError("sft: the recipe has no sft section. Give at least sft.datasets=FOLDER (`vla-rl collect`).")
    return sft


def _demonstrations(recipe: TrainRecipe) -> None:
    if recipe.needs_demonstrations:
        check_datasets(dataset.path for dataset in demonstrations_of(recipe).datasets)


def _keyframes(recipe: TrainRecipe) -> None:
    share, file = recipe.sampling.keyframe_share, recipe.sampling.keyframes
    if share and file is None:
        raise ConfigError(
            f"sampling.keyframes: is null, but sampling.keyframe_share is {share:g}; name the file that `vla-rl "
            "world-model keyframes` wrote, or set sampling.keyframe_share=0"
        )
    if share and file is not None and not file.is_file():
        raise ConfigError(f"sampling.keyframes: no file {file}; `vla-rl world-model keyframes` writes one")


def _check_stepped(env: EnvConfig) -> None:
    """
    Raises:
        ConfigError: nothing there answers an action.
    """
    if env.not_stepped:
        raise ConfigError(env.not_stepped)


def _learns_by_acting(recipe: Recipe) -> None:
    _check_stepped(recipe.env)


def _acts(recipe: Recipe) -> None:
    _check_stepped(recipe.acting_env)


def _real_episodes(recipe: TrainRecipe) -> None:
    evaluates, validates = recipe.train.evaluate != "never", recipe.train.validate_every
    if evaluates or validates or recipe.gate.every:
        recipe.check_same_robot()
        _acts(recipe)
    if evaluates:
        check_states(recipe, recipe.eval)
    if validates:
        check_states(recipe, recipe.validation)


def _final_evaluation(recipe: OfflineRecipe | OnlineRecipe | HilRecipe) -> None:
    section = getattr(recipe, recipe.run)
    if section.evaluate != "never":
        _evaluation(recipe)


def _base_checkpoint(recipe: Recipe) -> None:
    if recipe.policy.path is None or recipe.policy.kind == "value_guided":
        raise ConfigError(
            "policy.path: the run improves a checkpoint; give its folder or pretrained:NAME (of a value_guided policy: "
            "its base)"
        )
    _checkpoint(recipe)


def _checkpoint(recipe: Recipe) -> None:
    if recipe.policy.path:
        checkpoint_folder(recipe.policy)


def _acting_policy(recipe: Recipe) -> None:
    _check_stepped(recipe.env if recipe.collect is not None and recipe.collect.imagined else recipe.acting_env)
    if recipe.collect is not None and recipe.collect.source == "policy":
        _checkpoint(recipe)


def _practice(recipe: HilRecipe) -> None:
    if recipe.hil.actor != "recordings":
        _acts(recipe)
    if recipe.hil.practice is None:
        return
    reset_task, pairs = recipe.hil.practice.reset_task, recipe.env.reset_tasks
    if reset_task not in pairs:
        there = ", ".join(f"{reset} (undoes {forward})" for reset, forward in pairs.items()) or "none"
        raise ConfigError(f"hil.practice.reset_task: got {reset_task!r}; reset tasks of {recipe.env.kind}: {there}")
    tasks = list(recipe.env.env_spec().tasks)
    if sorted(tasks) != sorted((reset_task, pairs[reset_task])):
        raise ConfigError(
            f"env.tasks: got {', '.join(tasks)}; with hil.practice they are a task and the one that undoes it in the "
            f"same scene: set env.tasks=[{pairs[reset_task]},{reset_task}]"
        )


def _one_process(recipe: Recipe) -> None:
    if recipe.rollout.kind != "local":
        raise ConfigError(
            f"rollout.kind: got {recipe.rollout.kind!r}, but this command runs all episodes in its own process; use "
            "rollout.kind=local (docs/ray.md says which commands use a cluster)"
        )


def check_states(recipe: Recipe, evaluation: EvalConfig) -> None:
    """Check that the initial states of an evaluation are there, and that no mode comes twice.

    Raises:
        ValueError: they are not.
    """
    evaluation.modes()
    episode_specs(recipe.acting_env.env_spec(), evaluation)


def _evaluation(recipe: Recipe) -> None:
    if not recipe.acting_env.not_stepped:
        check_states(recipe, recipe.eval)
        return
    for name in _OF_SUCCESS:
        if (value := getattr(recipe.eval, name)) != EvalConfig.model_fields[name].default:
            raise ConfigError(
                f"eval.{name}: got {value!r}; on recordings the likeliest actions of all tasks are held against the "
                "recorded ones, and nothing is filmed: leave it out"
            )
    check_datasets((dataset.path for dataset in held_out_of(recipe)[0]), "eval.datasets")


def held_out_of(recipe: Recipe) -> tuple[Sequence[DatasetConfig], float]:
    """Return the datasets to measure action errors on, and the share of their episodes that is held out of cloning.

    Raises:
        ConfigError: neither `eval.datasets` nor a section that holds some out.
    """
    if recipe.eval.datasets:
        return recipe.eval.datasets, 1.0
    sft = getattr(recipe, "sft", None)
    if sft is None or not sft.validation_fraction:
        raise ConfigError(
            "eval.datasets: without a simulator a policy is held against recorded episodes that it has not learned; "
            "name them, or clone with sft.validation_fraction=0.1, which holds some out"
        )
    return sft.datasets, sft.validation_fraction


def _datasets(recipe: Recipe) -> None:
    check_datasets(dataset.path for dataset in demonstrations_of(recipe).datasets)


def _action_scale(recipe: Recipe) -> None:
    if recipe.acting_env.not_stepped and demonstrations_of(recipe).action_scale == "environment":
        spec = recipe.acting_env.env_spec()
        if max(spec.action_high.max(), -spec.action_low.min()) > 1:
            raise ConfigError(
                "sft.action_scale: got 'environment', which stands for actions of -1 to 1; the robot's are "
                f"{spec.action_low.min():g} to {spec.action_high.max():g}: leave it out (quantiles)"
            )


ANY = Command(Recipe)
EVAL = Command(Recipe, looks=(_evaluation, _checkpoint))
COLLECT = Command(Recipe, looks=(_acting_policy,))
SFT = Command(Recipe, looks=(_datasets, _action_scale, _checkpoint))
TRAIN = Command(
    TrainRecipe, "tabletop_grpo", (_learns_by_acting, _demonstrations, _keyframes, _real_episodes, _checkpoint)
)
LOOP = Command(LoopRecipe, "tabletop_imagination", (_acts, _demonstrations, _real_episodes, _checkpoint))
PLAN = Command(TrainRecipe, "tabletop_grpo", (_learns_by_acting,))
STUDY = Command(LoopRecipe, "tabletop_imagination", (_acts, _one_process))
FIT = Command(FitRecipe, "tabletop_world_model")
OFFLINE = Command(OfflineRecipe, "tabletop_offline", (_base_checkpoint, _final_evaluation))
ONLINE = Command(OnlineRecipe, "tabletop_online", (_acts, _base_checkpoint, _final_evaluation))
HIL = Command(HilRecipe, "tabletop_hil", (_base_checkpoint, _practice, _final_evaluation))
RAC = Command(RacRecipe, "tabletop_rac", (_acts,))
REWARD = Command(RewardRecipe, "tabletop_reward")
FAILURE = Command(FailureRecipe, "tabletop_failure", (_acts,))
HUB = Command(HubRecipe, "tabletop_hub", (_acts,))
