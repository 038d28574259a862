"""`pretrained:NAME`: a policy or a world model that ships with the package."""

from __future__ import annotations

from pathlib import Path

from vla_rl.common.errors import ConfigError

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
