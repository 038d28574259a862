"""A recipe: everything one run needs, from one YAML file.

Sections whose class depends on their `kind` (env, policy, algo) are resolved at run time; see
`vla_rl.config`. Each section's class sits beside the code that it configures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.config import Config, ConfigError, apply_overrides, component, find_recipe, read_yaml, validate
from vla_rl.distributed.config import DistributedConfig
from vla_rl.distributed.process_group import resolve_device
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.evaluation.gate import GateConfig
from vla_rl.interfaces import EnvConfig, FailureDetectionConfig, WorldModelFitConfig
from vla_rl.offpolicy.config import OfflineConfig, OnlineConfig
from vla_rl.policies.base import PolicyConfig
from vla_rl.recipe.checks import check
from vla_rl.recipe.collect_config import CollectConfig
from vla_rl.recipe.hil_config import HilConfig
from vla_rl.recipe.hub_config import HubConfig
from vla_rl.recipe.loop_config import LoopConfig
from vla_rl.recipe.rac_config import RacConfig
from vla_rl.rewards.config import RewardFitConfig
from vla_rl.rollout.source import LocalRolloutConfig, RolloutConfig
from vla_rl.rollout.task_sampling import SamplingConfig
from vla_rl.training.metrics import LogConfig
from vla_rl.training.sft import SFTConfig
from vla_rl.training.train import TrainConfig


class Recipe(Config):
    """One run. Commands read the sections they need: `train` env, policy, algo, sampling, train, eval, log."""

    name: str = Field(description="Names the run's folder.")
    description: str = Field(default="", description="What the recipe is for, in a sentence.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of everything random.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps.")
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="Several processes: ddp: each holds the whole policy; fsdp: weights, gradients and optimizer state "
        "are cut into one part per process. No meaning with one process.",
    )
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    num_threads: int = Field(default=0, ge=0, description="torch threads on a CPU; 0 leaves torch's choice.")
    env: Annotated[SerializeAsAny[EnvConfig], component("env")]
    real_env: Annotated[SerializeAsAny[EnvConfig] | None, component("env")] = Field(
        default=None,
        description="Where env is a world model: the simulator in which policies are evaluated and gains checked.",
    )
    policy: Annotated[SerializeAsAny[PolicyConfig], component("policy")]
    algo: Annotated[SerializeAsAny[AlgoConfig] | None, component("algo")] = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    rollout: Annotated[SerializeAsAny[RolloutConfig], component("rollout")] = Field(
        default_factory=LocalRolloutConfig,
        description="Where the episodes that RL learns from are run (docs/ray.md).",
    )
    train: TrainConfig = Field(default_factory=TrainConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    collect: CollectConfig | None = None
    datasets: tuple[CollectConfig, ...] = Field(
        default=(),
        description="Datasets that `world-model fit`, `offline`, `online`, `hil`, `reward fit` collect first, where "
        "they are missing.",
    )
    world_model: Annotated[SerializeAsAny[WorldModelFitConfig] | None, component("world_model")] = None
    failure: Annotated[SerializeAsAny[FailureDetectionConfig] | None, component("failure")] = None
    loop: LoopConfig = Field(default_factory=LoopConfig)
    sft: SFTConfig | None = None
    offline: OfflineConfig | None = None
    online: OnlineConfig | None = None
    hil: HilConfig | None = None
    reward: RewardFitConfig | None = None
    rac: RacConfig | None = None
    hub: HubConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def acting_env(self) -> EnvConfig:
        """The environment in which episodes count as real: `real_env`, or `env` where that is no world model.

        Without approximations that are for training, unless eval.approximate asks for them.

        Raises:
            ConfigError: env is a world model and there is no real_env.
        """
        if self.real_env is None and self.env.is_imagined:
            raise ConfigError(
                "real_env: the recipe has none, and its env is a world model; evaluating, collecting and the gate need "
                "a real environment: give real_env a section such as env's, or set train.evaluate=never, gate.every=0"
            )
        env = self.real_env or self.env
        return env if self.eval.approximate else env.exact()

    def check_machine(self) -> None:
        """Check that this machine has the recipe's device, and what its environments need, before any work.

        Raises:
            ConfigError: the device is none, or not here. RenderError: images cannot be rendered as is asked for.
        """
        resolve_device(self.device)
        for env in (self.env, self.real_env):
            if env is not None:
                env.check_machine()

    def check_same_robot(self) -> None:
        """Check that the policy meets in `real_env` what it has met in `env`.

        Raises:
            ConfigError: there is no real environment, or it differs in cameras, sizes or control rate, or lacks a task.
        """
        env, real = self.env, self.acting_env
        if real is env:
            return
        imagined, acting = env.env_spec(), real.env_spec()
        for field in ("cameras", "image_size", "state_dim", "action_dim", "control_hz"):
            if getattr(imagined, field) != getattr(acting, field):
                raise ConfigError(
                    f"real_env: its {field} is {getattr(acting, field)}, the world model's {getattr(imagined, field)}; "
                    "set real_env to what the world model was fitted on, or fit it again"
                )
        if lacking := sorted(set(imagined.tasks) - set(acting.tasks)):
            raise ConfigError(f"real_env.tasks: lacks {', '.join(lacking)}, which env has")

    @property
    def validation(self) -> EvalConfig:
        """What each validation of RL runs: the `eval` section's, on the validation split, greedy and as sampled."""
        train = self.train
        changes = {"split": "validation", "episodes_per_task": train.validation_episodes}
        return self.eval.model_copy(update=changes | {"temperatures": (0.0, train.temperature)})

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        check(self)
        return self


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe, by path or by the name of a shipped one.

    Raises:
        ConfigError: naming the field, the value and what is allowed.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {overrides!r}; give a list of such texts: [{overrides!r}]")
    return validate(Recipe, apply_overrides(read_yaml(find_recipe(name)), overrides))
