"""Pretrained policies and world models that ship with the package (`pretrained:NAME`), and how to make the others."""

from __future__ import annotations

from pathlib import Path

from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import STARTED_BY
from vla_rl.config import read_yaml, recipes_folder

PREFIX = "pretrained:"


def pretrained_entry(path: str | Path, root: Path, marker: str, option: str, kind: str) -> Path | None:
    """Return the folder below `root` that 'pretrained:NAME' stands for; None where the path is of another form.

    Args:
        marker: the file that every entry holds.
        option: what the path is given as, for the error ("policy path"). kind: what an entry is ("policy").

    Raises:
        ConfigError: no such entry (lists those there are).
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return None
    name = text.removeprefix(PREFIX)
    known = sorted(file.parent.name for file in root.glob(f"*/{marker}"))
    if name not in known:
        available = ", ".join(known) or "none"
        raise ConfigError(f"{option} {text!r}: no such pretrained {kind}. Available: {available}.")
    return root / name


def how_to_make(path: str | Path) -> str:
    """Return the commands that make a missing `runs/RECIPE/...` of a shipped recipe, as a sentence; "" of others."""
    names = [part for part in Path(path).parts if (recipes_folder() / f"{part}.yaml").is_file()]
    if not names:
        return ""
    recipe = read_yaml(recipes_folder() / f"{names[-1]}.yaml")
    command = STARTED_BY.get(recipe.get("run", "eval"), "train")
    before = f"`vla-rl collect {names[-1]}`, then " if "collect" in recipe and command == "sft" else ""
    return f" To make it: {before}`vla-rl {command} {names[-1]}`."
