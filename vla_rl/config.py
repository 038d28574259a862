"""Typed, frozen configs from YAML: the base class, components chosen by `kind`, overrides, errors.

A recipe is one YAML file. It may name a `base:` recipe, whose values it extends. `key=value`
arguments override (`algo.lr=1e-5`). What a section builds is chosen by its `kind`: a name known
here, or "package.module:Class" for a user's own config class. Resolution happens at run time, so
this module imports neither torch nor any simulator.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import logging
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from vla_rl.common.config_errors import ConfigError, check_packages
from vla_rl.common.config_fields import shared_fields
from vla_rl.common.config_paths import not_finite, on_top, owner_of, refuse_into_list, remaining
from vla_rl.common.yaml_text import Dumper, Loader

if TYPE_CHECKING:
    from vla_rl.interfaces import EnvConfig, PlanningConfig
    from vla_rl.policies.base import PolicyConfig

log = logging.getLogger(__name__)

# section -> kind -> where its config class lives.
KINDS: dict[str, dict[str, str]] = {
    "env": {
        "tabletop": "sim.tabletop:TabletopConfig",
        "libero": "sim.libero:LiberoConfig",
        "robosuite": "sim.robosuite.env:RobosuiteConfig",
        "maniskill": "sim.maniskill:ManiSkillConfig",
        "metaworld": "sim.metaworld:MetaWorldConfig",
        "robotwin": "sim.robotwin:RoboTwinConfig",
        "gymnasium": "sim.gymnasium_env:GymnasiumConfig",
        "remote": "sim.remote:RemoteConfig",
        "dummy": "sim.dummy:DummyConfig",
        "world_model": "world_model.env.config:WorldModelEnvConfig",
    },
    "world_model": {
        "latent_video": "world_model.fit.config:FitConfig",
    },
    "failure": {
        "conformal": "real_robot.failure.config:FailureConfig",
    },
    "transport": {
        "ros1": "real_robot.transports.ros1:Ros1Config",
        "ros2": "real_robot.transports.configs:Ros2Config",
        "rclpy": "real_robot.transports.rclpy_node:RclpyConfig",
        "rosbridge": "real_robot.transports.configs:RosbridgeConfig",
        "lerobot": "real_robot.transports.lerobot:LeRobotConfig",
    },
    "policy": {
        "openvla": "vla_rl.policies.openvla.config:OpenVLAConfig",
        "lerobot": "vla_rl.policies.lerobot.config:LeRobotConfig",
        "value_guided": "vla_rl.offpolicy.value_guided_config:ValueGuidedConfig",
        "advantage_conditioned": "vla_rl.offpolicy.advantage_conditioned_config:AdvantageConditionedConfig",
    },
    "algo": {
        "grpo": "vla_rl.algorithms.grpo:GRPOConfig",
        "mc_grpo": "vla_rl.algorithms.mc_grpo:MCGRPOConfig",
        "rloo": "vla_rl.algorithms.rloo:RLOOConfig",
        "ppo": "vla_rl.algorithms.ppo:PPOConfig",
        "reinforce_pp": "vla_rl.algorithms.reinforce_pp:ReinforcePPConfig",
        "dr_grpo": "vla_rl.algorithms.dr_grpo:DRGRPOConfig",
    },
    "dynamics": {
        "transformer": "world_model.config:TransformerConfig",
        "wan": "world_model.config:WanConfig",
    },
    "values": {
        "world_model": "world_model.env.value_config:WorldModelValuesConfig",
    },
    "env.reward": {
        "learned": "vla_rl.rewards.kinds:LearnedRewardConfig",
        "simulator": "vla_rl.rewards.kinds:SimulatorRewardConfig",
    },
    "rollout": {
        "local": "vla_rl.rollout.source:LocalRolloutConfig",
        "ray": "vla_rl.distributed.actors.config:RayRolloutConfig",
    },
    "plan": {
        "best_of_n": "world_model.env.plan_config:PlanConfig",
    },
}

# kind of run -> where the class of its recipes lives.
RUNS: dict[str, str] = {
    "eval": "vla_rl.recipe.recipe:Recipe",
    "sft": "vla_rl.recipe.runs:SFTRecipe",
    "train": "vla_rl.recipe.runs:TrainRecipe",
    "fit": "vla_rl.recipe.runs:FitRecipe",
    "loop": "vla_rl.recipe.runs:LoopRecipe",
    "offline": "vla_rl.recipe.runs:OfflineRecipe",
    "online": "vla_rl.recipe.runs:OnlineRecipe",
    "hil": "vla_rl.recipe.runs:HilRecipe",
    "rac": "vla_rl.recipe.runs:RacRecipe",
    "reward": "vla_rl.recipe.runs:RewardRecipe",
    "failure": "vla_rl.recipe.runs:FailureRecipe",
    "hub": "vla_rl.recipe.runs:HubRecipe",
}


# section -> the class that whatever it holds extends.
BASES: dict[str, str] = {
    "env": "vla_rl.interfaces:EnvConfig",
    "world_model": "vla_rl.interfaces:WorldModelFitConfig",
    "failure": "vla_rl.interfaces:FailureDetectionConfig",
    "policy": "vla_rl.policies.base:PolicyConfig",
    "algo": "vla_rl.algorithms.base:AlgoConfig",
    "values": "vla_rl.algorithms.action_values:ActionValuesConfig",
    "plan": "vla_rl.interfaces:PlanningConfig",
    "env.reward": "vla_rl.rewards.base:RewardConfig",
    "rollout": "vla_rl.rollout.source:RolloutConfig",
    "transport": "real_robot.transports.base:TransportConfig",
    "dynamics": "world_model.config:DynamicsConfig",
}


# Those that the tables above name.
OUR_PACKAGES = sorted({target.partition(".")[0] for kinds in KINDS.values() for target in kinds.values()})
DEFAULT_KINDS = {"plan": "best_of_n", "rollout": "local", "dynamics": "transformer"}  # Where a section names none.
# Options that are such a section under another name; `OPTION=KIND` is short for `OPTION.kind=KIND` there too.
_ELSEWHERE = {
    "real_env": "env",
    "env.first_frames": "env",
    "real_env.reward": "env.reward",
    "eval.plan": "plan",
    "collect.plan": "plan",
    "algo.values": "values",
    "world_model.model.dynamics": "dynamics",
}


class _SectionError(ConfigError):
    """What is wrong with a section whose class depends on its `kind`, each line beginning with `section`."""

    def __init__(self, section: str, message: str) -> None:
        super().__init__(message)
        self.section = section

    def at(self, name: str) -> str:
        """The message where the section has another name, as `env` has under `real_env`."""
        return re.sub(rf"^{re.escape(self.section)}(?=[.:])", lambda _: name, str(self), flags=re.MULTILINE)


class Config(BaseModel):
    """Base of every config: frozen, no unknown keys.

    Attributes:
        shorthand: the option that is meant where a text stands in place of the section; empty: none.
        bound_to_kind: options that mean something to one kind alone: a section loses them where its `kind` changes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    shorthand: ClassVar[str] = ""
    bound_to_kind: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand(cls, values: Any) -> Any:
        if cls.shorthand and isinstance(values, str):
            return {cls.shorthand: values}
        return values


# Not `def validate[C]`: this module and the tabletop also run in a simulator's Python, from 3.10 on.
C = typing.TypeVar("C", bound=Config)


def resolve_kind(section: str, kind: str, name: str = "") -> type[Config]:
    """The config class for a `kind` of a section: a known name or "package.module:Class".

    Args:
        name: the section's own, where it is not `section`, for errors.

    Raises:
        ConfigError: unknown name (with the nearest), or a class that cannot be imported.
    """
    check_packages(OUR_PACKAGES)
    known, name = KINDS[section], name or section
    if not isinstance(kind, str) or (kind not in known and ":" not in kind):
        raise _unknown_kind(section, kind, name)
    target = known.get(kind, kind)
    try:
        config_class = _import(target)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name}.kind: {kind!r} names {target!r}, which cannot be imported: {error}") from error
    base = _import(BASES[section])
    if not (isinstance(config_class, type) and issubclass(config_class, base)):
        needed = f"it must be a class that extends {base.__module__}.{base.__name__}"
        raise ConfigError(f"{name}.kind: {target!r} is no {section} section; {needed}")
    return config_class


def recipe_class(run: str) -> type[Config]:
    """The class of a kind of run's recipes: a name of `RUNS`, or "package.module:Class" of your own.

    Raises:
        ConfigError: unknown name (with the nearest), or a class that cannot be imported or is no recipe's.
    """
    if run not in RUNS and ":" not in run:
        raise ConfigError(
            f"run: got {run!r}, allowed: {', '.join(RUNS)}, or 'package.module:Class'.{_nearest(run, RUNS)}"
        )
    try:
        found = _import(RUNS.get(run, run))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"run: {run!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, _import(RUNS["eval"]))):
        raise ConfigError(f"run: {run!r} is no class that extends {RUNS['eval'].replace(':', '.')}")
    return found


def _unknown_kind(section: str, kind: Any, name: str) -> ConfigError:
    known = KINDS[section]
    allowed = f"{', '.join(sorted(known))}, or 'package.module:Class'"
    return ConfigError(f"{name}.kind: got {kind!r}, allowed: {allowed}.{_nearest(str(kind), known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _import(target: str) -> Any:
    module_name, _, class_name = target.partition(":")
    return getattr(importlib.import_module(module_name), class_name)


@typing.overload
def build_component(section: Literal["env"], values: Mapping[str, Any] | Config) -> EnvConfig: ...
@typing.overload
def build_component(section: Literal["policy"], values: Mapping[str, Any] | Config) -> PolicyConfig: ...
@typing.overload
def build_component(section: Literal["plan"], values: Mapping[str, Any] | Config) -> PlanningConfig: ...
@typing.overload
def build_component(section: str, values: Mapping[str, Any] | Config) -> Config: ...
def build_component(section: str, values: Mapping[str, Any] | Config) -> Config:
    """Validate a section whose class depends on its `kind`."""
    if isinstance(values, Config):
        return _of_section(section, values)
    if isinstance(values, Mapping) and "kind" not in values and section in DEFAULT_KINDS:
        values = {"kind": DEFAULT_KINDS[section], **values}
    if not isinstance(values, Mapping) or "kind" not in values:
        hint = f". Write it as a section: {{kind: {values}}}" if isinstance(values, str) else ""
        kinds = ", ".join(sorted(KINDS[section]))
        raise ConfigError(f"{section}: needs a 'kind', one of: {kinds}; got {values!r}{hint}")
    return validate(resolve_kind(section, values["kind"]), dict(values), prefix=section)


def _of_section(section: str, config: Config) -> Config:
    base = _import(BASES[section])
    if not isinstance(config, base):
        needed = f"it must be a config that extends {base.__module__}.{base.__name__}"
        raise ConfigError(f"{section}: got {type(config).__name__}; {needed}")
    return config


def component(section: str) -> Any:
    """Mark a field as a section whose class depends on its `kind`; None stays None."""

    def build(values: Any) -> Config | None:
        try:
            return None if values is None else build_component(section, values)
        except ConfigError as error:
            raise _SectionError(section, str(error)) from None

    return BeforeValidator(build)


def validate(config_class: type[C], values: dict[str, Any], prefix: str = "") -> C:  # noqa: UP047
    """`config_class(**values)`, with errors that say the field's full name, what it got and what it allows.

    A number that is infinite or NaN is a slip, in whatever option.
    """
    try:
        config = config_class.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        above = {e["loc"][:n] for e in faults for n in range(len(e["loc"]))}  # A list of wrong items only looks empty.
        faults = [e for e in faults if e["type"] != "too_short" or e["loc"] not in above]
        # A default that depends on other fields, one of which is at fault, is no fault of its own.
        faults = [e for e in faults if e["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(_explain(config_class, e, prefix) for e in faults)) from None
    if endless := list(not_finite(config, prefix)):
        raise ConfigError(
            "\n".join(f"{name}: got {value}. Input should be a finite number." for name, value in endless)
        )
    return config


_A_LIST = "A list is needed, such as [a, b]"
_PLAIN = {"tuple_type": _A_LIST, "list_type": _A_LIST, "model_type": "A section is needed, such as {key: value}"}


def _explain(config_class: type[BaseModel], error: Any, prefix: str) -> str:
    path = [str(p) for p in error["loc"]]
    owner, shown = owner_of(config_class, path)
    name = ".".join([prefix, *shown]) if prefix else ".".join(shown)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.at(name) if isinstance(cause, _SectionError) else str(cause)
    if error["type"] == "extra_forbidden":
        fields = list(owner.model_fields)
        nearest = difflib.get_close_matches(path[-1], fields, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        return f"{name}: unknown key (value {error['input']!r}).{hint} Allowed: {', '.join(sorted(fields))}."
    if error["type"] == "missing":
        return f"{name}: required, but not given."
    reason = f"{cause or _PLAIN.get(error['type'], error['msg'])}".rstrip(".") + "."
    if cause is not None and isinstance(error["input"], Mapping | BaseModel):
        return f"{name}: {reason}"  # A fault of several fields together, which the reason names.
    return f"{name}: got {error['input']!r}. {reason}"


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a recipe file's mapping, with its `base:` chain merged in; `above` are the files whose base this one is.

    Raises:
        ConfigError: file missing, not YAML, not a mapping, or a base that leads back to itself.
    """
    path = Path(path).resolve()
    if path in above:
        raise ConfigError(f"base: {path} is its own base ({' -> '.join(p.name for p in (*above, path))})")
    if not path.is_file():
        raise ConfigError(f"recipe not found: {path}. `vla-rl list recipes` shows those that ship with the package.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, got {type(values).__name__}")
    base = values.pop("base", None)
    level = logging.DEBUG if path.parent == recipes_folder() else logging.WARNING  # What ships has been looked at.
    return values if base is None else merge(_shared(_read_base(path, base, above), values), values, level)


def _shared(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Of a base that is for another kind of run, the sections that recipes of both kinds have."""
    run = over.get("run", base.get("run"))
    if run == base.get("run") or run is None:
        return base
    sections = recipe_class(str(run)).model_fields
    return {name: section for name, section in base.items() if name in sections}


def _read_base(path: Path, base: Any, above: tuple[Path, ...]) -> dict[str, Any]:
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: expected the path or name of a recipe, got {base!r}")
    beside = path.parent / base
    return read_yaml(beside if beside.is_file() else find_recipe(base, f"{path}: base: "), (*above, path))


def merge(base: Mapping[str, Any], over: Mapping[str, Any], level: int = logging.WARNING) -> dict[str, Any]:
    """`base` with `over` on top, section by section.

    A section whose `kind` changes keeps the options that both kinds share (`shared_fields`). A line of this level says
    what else it had.
    """
    return on_top(remaining(base, over, functools.partial(_carried, level)), over)


def _carried(level: int, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Mapping[str, Any]:
    """What remains of the section of a name under `new`. See `merge`."""
    section = _ELSEWHERE.get(name, name)
    was = old.get("kind", DEFAULT_KINDS.get(section))
    kind = new.get("kind", was)
    if section not in KINDS or was in (None, kind):
        return old
    shared = shared_fields(resolve_kind(section, was, name), resolve_kind(section, kind, name))
    if lost := sorted(old.keys() - shared - new.keys()):
        log.log(level, f"{name}.kind: {was!r} became {kind!r}, so what was said of {', '.join(lost)} is left out")
    return {key: value for key, value in old.items() if key in shared}


def parse_override(text: str) -> dict[str, Any]:
    """Read `"algo.lr=1e-5"` as `{"algo": {"lr": 1e-05}}`, and `"algo=ppo"` as `{"algo": {"kind": "ppo"}}`.

    Raises:
        ConfigError: key or value cannot be read.
    """
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r}: expected key=value, for example algo.lr=1e-5")
    try:
        value: Any = yaml.load(raw, Loader) if raw else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {error}") from None
    if key in (*KINDS, *_ELSEWHERE) and isinstance(value, str):
        value = {"kind": value}
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with each `key=value` on top, in order; none is lost by a section's `kind` that follows it."""
    overs = [(text, parse_override(text)) for text in overrides]
    together = functools.reduce(on_top, (over for _, over in overs), {})
    result = remaining(values, together, functools.partial(_carried, logging.WARNING))
    for text, over in overs:
        refuse_into_list(text, result)
        result = on_top(result, over)
    return result


def find_recipe(name: str | Path, asked_by: str = "") -> Path:
    """A recipe by path, or by the name of one that ships with the package (with or without .yaml)."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = recipes_folder() / (path.name if path.suffix else f"{path.name}.yaml")
    if shipped.is_file() and path.parent == Path("."):
        return shipped
    hint = _nearest(path.stem, (p.stem for p in recipes_folder().glob("*.yaml")))
    raise ConfigError(
        f"{asked_by}recipe not found: {path}.{hint} `vla-rl list recipes` shows those that ship with the package."
    )


def recipes_folder() -> Path:
    """Where the shipped recipes live: inside the installed package, or in `configs/` of a clone."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def dump_yaml(config: Config) -> str:
    """A resolved config as YAML that loads again to the same config."""
    values = config.model_dump(mode="json")
    text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in "\x85\u2028\u2029"):  # Line breaks to YAML: written as escapes.
        text = yaml.dump(values, Dumper=Dumper, sort_keys=False)
    return text
