"""Loading a policy of any family from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.config import resolve_kind
from vla_rl.interfaces import Policy
from vla_rl.policies.base import CONFIG_FILE, OWN_FILE, PolicyConfig, read_json, resolve_path
from vla_rl.policies.inspect import describe

if TYPE_CHECKING:
    import torch


def _saved_kind(folder: Path) -> str | None:
    """Return the `kind` that a policy saved by this package names; None for a folder from elsewhere."""
    for file in (folder / OWN_FILE, folder / CONFIG_FILE):
        if file.is_file() and isinstance(kind := read_json(file).get("kind"), str):
            return kind
    return None


def load_policy(path: str | Path, device: str | torch.device = "cpu") -> Policy:
    """Load the policy saved at a path (or 'pretrained:NAME'), on `device`, ready to act.

    Raises:
        ConfigError: unknown path or kind.
        ValueError: no policy family knows the folder, or a file of it is missing or damaged.
    """
    folder = resolve_path(path)
    config_class = resolve_kind("policy", _saved_kind(folder) or describe(folder).kind)
    assert issubclass(config_class, PolicyConfig), f"{config_class} must derive from PolicyConfig"
    return config_class.load(folder, device)
