"""What workflows build of a recipe: policy, spec, sections that must be there; and what they print of a run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.distributed.process_group import resolve_device
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.recipe.recipe import Recipe
from vla_rl.recipe.runs import FitRecipe
from vla_rl.types import EnvSpec
from world_model.env.config import WorldModelEnvConfig
from world_model.fit.config import FitConfig


def build_policy(recipe: Recipe, spec: EnvSpec) -> Policy:
    """The recipe's policy for an environment of this spec, on the recipe's device.

    Raises:
        ConfigError: the recipe's policy class builds nothing, or does not fit the environment.
    """
    limit_threads(recipe)
    return recipe.policy.build(spec, device=resolve_device(recipe.device), seed=recipe.seed)


def limit_threads(recipe: Recipe) -> None:
    """torch's threads, as the recipe says."""
    if recipe.num_threads:
        torch.set_num_threads(recipe.num_threads)


def env_spec(recipe: Recipe) -> EnvSpec:
    return recipe.acting_env.env_spec()


def imagining(recipe: Recipe) -> WorldModelEnvConfig:
    """Return the env section of a recipe that is run in imagination; one of a user's own has its fields."""
    return cast(WorldModelEnvConfig, recipe.env)


def world_model_section(recipe: FitRecipe) -> FitConfig:
    """Return the recipe's `world_model` section.

    Raises:
        ConfigError: there is none, or its class is not one for `vla-rl world-model fit`.
    """
    section = recipe.world_model
    if not isinstance(section, FitConfig):
        raise ConfigError(f"the recipe's world_model is a {type(section).__name__}; it must be a {FitConfig.__name__}")
    return section


def policy_and_report(folder: Path) -> list[str]:
    """Return the lines that name a run's policy and page."""
    run = RunFolder(folder)
    return [f"policy: {run.policy}", f"report: {run.report}"]


def policy_path(recipe: Recipe) -> Path | None:
    """The folder of the recipe's checkpoint; None of a fresh policy."""
    path = getattr(recipe.policy, "path", None)
    return None if path is None else resolve_path(path)


def policy_version(recipe: Recipe) -> str:
    """What a dataset says of who acted: the policy's path and the hash of its weights."""
    path = policy_path(recipe)
    return f"fresh, seed {recipe.seed}" if path is None else f"{path.name} {policy_hash(path)[:12]}"
