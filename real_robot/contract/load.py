"""Contracts read from their YAML files, with limits of joint commands completed from the robot's URDF or MJCF.

Limits that are left out are filled in from the robot's file, and wider ones cut. That is done in the file's radians and
meters until it is written into `safety`, which is in the action's own units. `commanded_joints` and `measured_joints`
say which joint of that file each number of an action, or of the state, is."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.contract.contract import RobotContract
from real_robot.contract.model import JointName, ModelConfig
from real_robot.contract.safety import DimensionLimits, SafetyConfig
from vla_rl.config import ConfigError, apply_overrides, read_yaml, validate

log = logging.getLogger(__name__)
UNKNOWN = 1e9  # stands for what the contract leaves to the file, until the file has been read
POSE = "geometry_msgs/PoseStamped"


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


@dataclass(frozen=True)
class Scaled:
    """One number of an action or state, and the joint that it is: position = scale * number + offset.

    `sign` of a velocity's scale is kept, its offset has no meaning.
    """

    number: int
    joint: str
    scale: float
    offset: float

    def number_of(self, position: float) -> float:
        """The number that puts the joint there."""
        return (position - self.offset) / self.scale


def commanded_joints(contract: RobotContract, model: ModelConfig) -> list[Scaled]:
    """Which numbers of the action are joints.

    Raises:
        ConfigError: model.commands names a number that the action lacks, one joint is commanded twice, or a pose is
            commanded: no model can tell which of the joints' ways there the robot takes.
    """
    found: list[Scaled] = []
    if poses := [sink.topic for sink in contract.action if sink.type == POSE]:
        raise ConfigError(
            f"model: {poses[0]} takes poses ({POSE}), which cannot be checked against the robot's model: which joints "
            "get it there is the robot's choice; command joints or twists, or leave `model` out"
        )
    for sink in contract.action:
        for place, number in enumerate(sink.indices):
            scale, offset = sink.convert.of(place)
            link = model.commands.get(number)
            if link is None and place < len(sink.joints):
                link = model.joint_of(sink.joints[place])
            if link is not None:
                found.append(Scaled(number, link.joint, link.scale * scale, link.scale * offset + link.offset))
    _check("model.commands", found, model.commands, contract.action_dim)
    return found


def measured_joints(contract: RobotContract, model: ModelConfig) -> list[Scaled]:
    """Which numbers of the observed state are joints' positions.

    Raises:
        ConfigError: model.states names a number that the state lacks, or one joint is measured twice.
    """
    found: list[Scaled] = []
    number = 0
    for source in contract.observation.state:
        for place in range(source.num_values):
            scale, offset = source.convert.of(place)
            link = model.states.get(number)
            if link is None and source.joints:
                link = model.joint_of(source.joints[place])
            if link is not None and scale != 0:
                found.append(Scaled(number, link.joint, link.scale / scale, link.offset - link.scale * offset / scale))
            number += 1
    _check("model.states", found, model.states, number)
    return found


def _check(section: str, found: list[Scaled], told: dict[int, JointName], size: int) -> None:
    if wrong := [number for number in told if not 0 <= number < size]:
        raise ConfigError(f"{section}: {wrong[0]}: the contract has the numbers 0 to {size - 1}")
    joints = [link.joint for link in found]
    if twice := [joint for joint in joints if joints.count(joint) > 1]:
        raise ConfigError(f"{section}: joint {twice[0]} stands for two numbers")
    if flat := [link.joint for link in found if link.scale == 0 or not np.isfinite(link.scale)]:
        raise ConfigError(f"{section}: joint {flat[0]}: convert.scale must not be 0")
