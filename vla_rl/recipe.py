"""A recipe: everything one run needs, from one YAML file.

Sections whose class depends on their `kind` (env, policy, algo) are resolved at run time; see
`vla_rl.config`. Each section's class sits beside the code that it configures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny

from vla_rl.collect import CollectConfig
from vla_rl.config import Config, apply_overrides, build_component, find_recipe, read_yaml, validate
from vla_rl.evaluate import EvalConfig
from vla_rl.metrics import LogConfig
from vla_rl.sft import SFTConfig
from vla_rl.task_sampling import SamplingConfig
from vla_rl.train import TrainConfig


def _component(section: str) -> Any:
    return BeforeValidator(lambda values: None if values is None else build_component(section, values))


class Recipe(Config):
    """One run. Commands read the sections they need: `train` env, policy, algo, sampling, train, eval, log."""

    name: str = Field(description="Names the run's folder.")
    description: str = Field(default="", description="What the recipe is for, in a sentence.")
    seed: int = Field(default=0, description="Of everything random.")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    num_threads: int = Field(default=0, ge=0, description="torch threads on a CPU; 0 leaves torch's choice.")
    env: Annotated[SerializeAsAny[Config], _component("env")]
    policy: Annotated[SerializeAsAny[Config], _component("policy")]
    algo: Annotated[SerializeAsAny[Config] | None, _component("algo")] = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    collect: CollectConfig | None = None
    sft: SFTConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe, by path or by the name of a shipped one.

    Raises:
        ConfigError: naming the field, the value and what is allowed.
    """
    return validate(Recipe, apply_overrides(read_yaml(find_recipe(name)), overrides))


def resolve_device(device: str) -> str:
    """ "auto" -> "cuda" where torch finds one, else "cpu"."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
