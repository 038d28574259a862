"""Which policy family a checkpoint folder belongs to, and what can be done with it.

A family registers a small function in `FAMILIES`: folder -> `CheckpointInfo`, or None where the
folder is not its. The function reads JSON and headers only, so that looking costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.policies.base import CONFIG_FILE

# family -> "module:function". Asked in this order; the first that knows the folder counts.
FAMILIES: dict[str, str] = {
    "openvla": "vla_rl.policies.openvla.inspect:describe",
    "lerobot": "vla_rl.policies.lerobot.config:describe",
}


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is.

    Attributes:
        family: for people, "OpenVLA-OFT, L1 head".
        kind: of the recipe's `policy` section.
        facts: name -> value, shown as a table: decoder, chunk size, cameras, state, sizes, precision.
        norm_keys: datasets whose statistics it holds.
        rl: algorithms' names that can train it as it is; empty: see `rl_reason`.
        rl_reason: why RL cannot train it and what to do, or what is special; "" for nothing.
        policy: the recipe's `policy` section with what must or should be said, `path` left out.
        warnings: what a person should know or choose.
    """

    family: str
    kind: str
    facts: dict[str, str]
    norm_keys: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()
    rl_reason: str = ""
    policy: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def recipe_line(self, path: str) -> str:
        """The `policy` section in one line of YAML."""
        values = {"kind": self.kind, "path": path, **self.policy}
        return "policy: {" + ", ".join(f"{k}: {_yaml(v)}" for k, v in values.items()) + "}"

    def text(self, path: str) -> str:
        """For people."""
        width = max(len(name) for name in (*self.facts, "norm keys"))
        lines = [self.family, *(f"  {name:<{width}}  {value}" for name, value in self.facts.items())]
        if self.norm_keys:
            lines.append(f"  {'norm keys':<{width}}  {', '.join(self.norm_keys)}")
        lines.append(f"  {'RL':<{width}}  {', '.join(self.rl) if self.rl else 'no'}")
        if self.rl_reason:
            lines.append(f"  {'':<{width}}  {self.rl_reason}")
        lines += [f"  note: {warning}" for warning in self.warnings]
        return "\n".join([*lines, "", self.recipe_line(path)])


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value)


def describe(folder: Path) -> CheckpointInfo:
    """What the checkpoint in a folder is.

    Raises:
        ValueError: no family knows it, or a file of it is missing or damaged.
    """
    folder = Path(folder)
    for target in FAMILIES.values():
        module_name, _, function_name = target.partition(":")
        function: Callable[[Path], CheckpointInfo | None] = getattr(importlib.import_module(module_name), function_name)
        if (info := function(folder)) is not None:
            return info
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder / CONFIG_FILE}: not found. A policy folder holds {CONFIG_FILE}, weights and more.")
    raise ValueError(
        f"{folder / CONFIG_FILE}: has no 'kind', and no policy family knows this folder ({', '.join(FAMILIES)}), so it "
        "is neither a policy saved by this package nor a checkpoint that it can read."
    )
