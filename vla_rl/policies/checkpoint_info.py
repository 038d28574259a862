"""Checkpoint description, as `vla-rl inspect` prints it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
