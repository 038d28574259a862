"""Parts that workflows build of a recipe: policy, spec, required sections; and what they print of a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import cast

import torch

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.config import ConfigError, read_yaml
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.recipe.recipe import Recipe
from vla_rl.recipe.runs import FitRecipe
from vla_rl.types import EnvSpec
from world_model.env.config import WorldModelEnvConfig
from world_model.fit.config import FitConfig

# Environments whose kind says which robot and scene they are.
SIMULATORS = ("tabletop", "libero", "robosuite", "maniskill", "metaworld", "robotwin")


def build_policy(recipe: Recipe, spec: EnvSpec) -> Policy:
    """The recipe's policy for an environment of this spec, on the recipe's device.

    Raises:
        ConfigError: the recipe's policy class builds nothing, or does not fit the environment.
    """
    limit_threads(recipe)
    path = policy_path(recipe)
    other = path and other_environment(path, recipe.acting_env.kind)
    if other:
        warnings.warn(f"policy.path: {path} was trained in {other}, and this is {recipe.acting_env.kind}", stacklevel=2)
    return recipe.policy.build(spec, device=resolve_device(recipe.device), seed=recipe.seed)


def other_environment(path: Path, kind: str) -> str:
    """The kind of another environment that a policy's folder says it is of; empty where it says none, or this one.

    The recipe of its run says it, which lies beside it; else the names of the datasets in its statistics.
    """
    recipe = path.parent / "config.yaml"
    if recipe.is_file():
        values = read_yaml(recipe)
        said = {str((values.get(section) or {}).get("kind")) for section in ("real_env", "env")}
    else:
        file = path / "dataset_statistics.json"
        names = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        said = {known for known in SIMULATORS for name in names if name.startswith(known)}
    said &= {*SIMULATORS}
    return ", ".join(sorted(said)) if kind in SIMULATORS and said and kind not in said else ""


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


def policy_path(recipe: Recipe) -> Path | None:
    """The folder of the recipe's checkpoint; None of a fresh policy."""
    path = getattr(recipe.policy, "path", None)
    return None if path is None else resolve_path(path)


def policy_version(recipe: Recipe) -> str:
    """What a dataset says of who acted: the policy's path and the hash of its weights."""
    path = policy_path(recipe)
    if path is None and recipe.policy.remote:
        return f"served at {recipe.policy.remote}"
    return f"fresh, seed {recipe.seed}" if path is None else f"{path.name} {policy_hash(path)[:12]}"
