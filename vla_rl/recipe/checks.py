"""Checks of a recipe before any work, by its files and by facts of the environment.

Nothing here builds an environment or a policy. Which sections a recipe may have, and how they fit together, is said by
its class (`recipe.py`, `runs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.hub import check_datasets
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.policies.base import checkpoint_folder
from vla_rl.recipe.recipe import Command, Recipe, TrainRecipe, check_states, check_stepped
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
)
from vla_rl.training.config import SFTConfig

# Options of an evaluation that action errors on recordings have no use for.
_OF_SUCCESS = ("split", "tasks", "start_index", "temperatures", "samples_per_state", "videos", "plan")


def demonstrations_of(recipe: Recipe) -> SFTConfig:
    """Return the recipe's section of behavior cloning.

    Raises:
        ConfigError: it has none.
    """
    sft = getattr(recipe, "sft", None)
    if sft is None:
        raise ConfigError("sft: the recipe has no sft section. Give at least sft.datasets=FOLDER (`vla-rl collect`).")
    return sft


def _acts(recipe: Recipe) -> None:
    check_stepped(recipe.acting_env)


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


def _frozen_base(recipe: Recipe) -> None:
    if not recipe.policy.remote:
        _base_checkpoint(recipe)


def _checkpoint(recipe: Recipe) -> None:
    if recipe.policy.path:
        checkpoint_folder(recipe.policy)


def _acting_policy(recipe: Recipe) -> None:
    check_stepped(recipe.env if recipe.collect is not None and recipe.collect.imagined else recipe.acting_env)
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


EVAL = Command(Recipe, looks=(_evaluation, _checkpoint))
COLLECT = Command(Recipe, looks=(_acting_policy,))
SFT = Command(Recipe, looks=(_datasets, _action_scale, _checkpoint))
LOOP = Command(LoopRecipe, "tabletop_imagination", (LoopRecipe.check_inputs,))
PLAN = Command(TrainRecipe, "tabletop_grpo", (lambda recipe: check_stepped(recipe.env),))
STUDY = Command(LoopRecipe, "tabletop_imagination", (_acts, _one_process))
FIT = Command(FitRecipe, "tabletop_world_model")
OFFLINE = Command(OfflineRecipe, "tabletop_offline", (_base_checkpoint, _final_evaluation))
ONLINE = Command(OnlineRecipe, "tabletop_online", (_acts, _frozen_base, _final_evaluation))
HIL = Command(HilRecipe, "tabletop_hil", (_frozen_base, _practice, _final_evaluation))
RAC = Command(RacRecipe, "tabletop_rac", (_acts,))
REWARD = Command(RewardRecipe, "tabletop_reward")
FAILURE = Command(FailureRecipe, "tabletop_failure", (_acts,))
HUB = Command(HubRecipe, "tabletop_hub", (_acts,))
