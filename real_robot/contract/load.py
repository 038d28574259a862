"""Contracts read from their YAML files, with limits of joint commands completed from the robot's URDF or MJCF.

Limits that are left out are filled in from the robot's file, and wider ones cut. That is done in the file's radians and
meters until it is written into `safety`, which is in the action's own units."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from real_robot.contract.contract import RobotContract
from real_robot.contract.joint_mapping import Scaled, commanded_joints
from real_robot.contract.model import ModelConfig
from real_robot.contract.safety import DimensionLimits, SafetyConfig
from vla_rl.config import ConfigError, apply_overrides, read_yaml, validate

log = logging.getLogger(__name__)
UNKNOWN = 1e9  # stands for what the contract leaves to the file, until the file has been read


def load_contract(name: str | Path, overrides: Iterable[str] = ()) -> RobotContract:
    """A contract by path, or by the name of one that ships, with `key=value` overrides on top.

    Raises:
        ConfigError: no such file, not YAML, or a wrong key or value (the message names it); or the file of
            `model` cannot be used.
    """
    path = _find(name)
    values: dict[str, Any] = apply_overrides(read_yaml(path), overrides)
    rate = values.setdefault("rate", RobotContract.model_fields["rate"].default)
    for section in ("safety", "execution"):
        if isinstance(values.setdefault(section, {}), dict):
            values[section] = {"control_hz": rate, **values[section]}
    prepare_limits(values, path.parent)
    return apply_limits(validate(RobotContract, values))


def shipped_contracts() -> dict[str, Path]:
    """Name -> file of the contracts that ship with the package."""
    return {p.stem: p for p in sorted((Path(__file__).parent / "robots").glob("*.yaml"))}


def is_contract(name: str) -> bool:
    """Whether this names a robot's contract, and not a recipe: a shipped one, or a file with observation and action."""
    if Path(name).is_file():
        values = read_yaml(Path(name))
        return isinstance(values, dict) and {"observation", "action"} <= set(values)
    return Path(name).parent == Path(".") and Path(name).stem in shipped_contracts()


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_contracts()
    if path.parent == Path(".") and path.stem in shipped and path.suffix in ("", ".yaml"):
        return shipped[path.stem]
    nearest = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"robot contract not found: {name}.{hint} Shipped: {', '.join(shipped)}.")


def prepare_limits(values: dict[str, Any], folder: Path) -> None:
    """Make the model's file absolute, and mark limits that are left out, in a contract's raw values."""
    model, safety = values.get("model"), values.get("safety")
    if not isinstance(model, dict):
        return
    if isinstance(model.get("file"), str):
        values["model"] = {**model, "file": str((folder / Path(model["file"]).expanduser()).resolve())}
    dimensions = safety.get("dimensions") if isinstance(safety, dict) else None
    if isinstance(safety, dict) and isinstance(dimensions, list):
        values["safety"] = {**safety, "dimensions": [_with_marks(d) if isinstance(d, dict) else d for d in dimensions]}


def _with_marks(limits: dict[str, Any]) -> dict[str, Any]:
    marked = {"low": -UNKNOWN, "high": UNKNOWN, **limits}
    if limits.get("kind") == "position" and not {"max_velocity", "max_step"} & set(limits):
        marked["max_velocity"] = UNKNOWN
    return marked


def apply_limits(contract: RobotContract) -> RobotContract:
    """The contract with its joint commands' limits within those of the model's file.

    Raises:
        ConfigError: the file cannot be read, has no such joint, has no limit where the contract has none, or leaves
            nothing of a range.
    """
    model = contract.model
    if model is None:
        return contract
    from real_robot.contract.robot_file import read_joints  # with MuJoCo, which robots without a model do without

    facts = read_joints(Path(model.file))
    links = {link.number: link for link in commanded_joints(contract, model)}
    dimensions = list(contract.safety.dimensions)
    for number, limits in enumerate(dimensions):
        if number in links:
            changes = dict(_narrowed(limits, links[number], facts, model))
            for name, value in changes.items():
                log.info("safety: %s: %s %s -> %g (%s)", limits.name, name, getattr(limits, name), value, model.file)
            dimensions[number] = validate(DimensionLimits, {**limits.model_dump(), **changes})
        _check_known(dimensions[number], model)
    safety = {**contract.safety.model_dump(), "dimensions": [d.model_dump() for d in dimensions]}
    return contract.model_copy(update={"safety": validate(SafetyConfig, safety)})


def _narrowed(
    limits: DimensionLimits, link: Scaled, facts: Mapping[str, Any], model: ModelConfig
) -> Iterator[tuple[str, float]]:
    """(limit, value) that the file changes, in the action's unit."""
    fact = facts.get(link.joint)
    if fact is None or fact.mimic is not None:
        own = [name for name, f in facts.items() if f.mimic is None]
        raise ConfigError(
            f"model: {limits.name}: the file has no joint {link.joint!r} of its own; it has: {', '.join(own)}. "
            "Say in model.joints which it is"
        )
    speed = fact.velocity / abs(link.scale)
    if limits.kind == "velocity":
        ends = (-speed, speed)
    else:
        margin = model.margin_of(link.joint, fact.is_slide)
        ends = sorted((link.number_of(fact.low + margin), link.number_of(fact.high - margin)))
        if fact.high - fact.low <= 2 * margin:
            raise ConfigError(
                f"model: {limits.name}: margin {margin:g} leaves nothing of joint {link.joint}'s range "
                f"{fact.low:g}..{fact.high:g} in {model.file}"
            )
        if math.isfinite(speed) and (limits.max_velocity is None or speed < limits.max_velocity):
            yield "max_velocity", speed
    if ends[0] > limits.low:
        yield "low", ends[0]
    if ends[1] < limits.high:
        yield "high", ends[1]


def _check_known(limits: DimensionLimits, model: ModelConfig) -> None:
    for name in ("low", "high", "max_velocity"):
        if abs(getattr(limits, name) or 0.0) >= UNKNOWN:
            raise ConfigError(f"safety: {limits.name}: {name} is missing, and {model.file} has no limit for it")
