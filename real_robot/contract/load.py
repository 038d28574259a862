"""Contracts read from their YAML files, by path or by the name of one that ships."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from real_robot.contract.contract import RobotContract
from real_robot.contract.joint_limits import apply_limits, prepare_limits
from vla_rl.config import ConfigError, apply_overrides, read_yaml, validate


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
