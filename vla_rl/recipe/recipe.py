"""A recipe: everything one run needs, from one YAML file.

`run` names the kind of run, whose class (`runs.py`) says which sections a recipe may have. Sections whose class depends
on their `kind` (env, policy, algo) are resolved at run time; see `vla_rl.config`. Each section's class sits beside the
code that it configures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from vla_rl.common.distributed.config import DistributedConfig
from vla_rl.common.distributed.process_group import check_device_name, resolve_device
from vla_rl.config import (
    RUNS,
    Config,
    ConfigError,
    apply_overrides,
    component,
    find_recipe,
    read_yaml,
    recipe_class,
    validate,
)
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.interfaces import EnvConfig
from vla_rl.policies.base import PolicyConfig
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.rollout.source import LocalRolloutConfig, RolloutConfig
from vla_rl.training.metrics import LogConfig


class Rule(NamedTuple):
    """A combination of sections that their types permit and a run does not.

    Attributes:
        is_broken: whether the recipe is refused.
        message: names the field, its value and what to do.
    """

    is_broken: Callable[..., object]
    message: Callable[..., str]


class Recipe(Config):
    """What every kind of run has, and all that evaluating and collecting need."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda r: r.real_env is not None and (r.real_env.is_imagined or not r.env.is_imagined),
            lambda r: (
                "real_env: is for a recipe whose env is a world model, and is itself a simulator or robot; got env "
                f"{r.env.kind!r}, real_env {r.real_env.kind!r}"
            ),
        ),
        Rule(
            lambda r: r.eval.approximate and getattr(r.real_env or r.env, "reward", None),
            lambda r: (
                "eval.approximate: got true with env.reward, which would evaluate policies by what a reward says; set "
                "it to false"
            ),
        ),
    )

    run: str = Field(
        default="eval",
        description="The kind of run, which says what further sections there are: train, sft, loop, fit, offline, "
        "online, hil, rac, reward, failure, hub; eval: none.",
    )
    name: str = Field(description="Names the run's folder.")
    description: str = Field(default="", description="What the recipe is for, in a sentence.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of everything random.")
    device: Annotated[str, AfterValidator(check_device_name)] = Field(
        default="auto", description="auto, cpu, cuda, cuda:N or mps."
    )
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
    rollout: Annotated[SerializeAsAny[RolloutConfig], component("rollout")] = Field(
        default_factory=LocalRolloutConfig,
        description="Where the episodes that RL learns from are run (docs/ray.md).",
    )
    collect: CollectConfig | None = None
    datasets: tuple[CollectConfig, ...] = Field(
        default=(),
        description="Datasets that `world-model fit`, `offline`, `online`, `hil`, `reward fit` collect first, where "
        "they are missing.",
    )
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

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if broken := [rule.message(self) for rule in self.rules if rule.is_broken(self)]:
            raise ConfigError("\n".join(broken))
        return self


def read_recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of these values, of the kind of run that they name.

    Raises:
        ConfigError: naming the field, the value and what is allowed.
    """
    if "run" not in values:
        raise ConfigError(f"run: the recipe does not say what it is for; add one of: {', '.join(RUNS)}")
    config_class: type[Any] = recipe_class(str(values["run"]))
    if unknown := sorted(values.keys() - config_class.model_fields.keys()):
        _check_sections(str(values["run"]), unknown)
    return validate(config_class, dict(values))


def _check_sections(own: str, unknown: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: of the sections unknown to recipes of `own` kind, some are those of other kinds.
    """
    faults = []
    for name in unknown:
        if kinds := [run for run in RUNS if name in recipe_class(run).model_fields]:
            faults.append(
                f"{name}: a recipe of run {own!r} has no such section; run {', '.join(kinds)} has. Leave it "
                "out, or set run"
            )
    if faults:
        raise ConfigError("\n".join(faults))


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe, by path or by the name of a shipped one.

    Raises:
        ConfigError: naming the field, the value and what is allowed.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {overrides!r}; give a list of such texts: [{overrides!r}]")
    return read_recipe(apply_overrides(read_yaml(find_recipe(name)), overrides))
