"""Loading of policies, and recognition of a checkpoint folder: its family, and what can be done with it.

Every kind of policy is asked (`PolicyConfig.describe`). It reads JSON and headers only, so that looking costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.config import KINDS, resolve_kind
from vla_rl.interfaces import Policy
from vla_rl.policies.base import CONFIG_FILE, OWN_FILE, CheckpointInfo, PolicyConfig, read_json, resolve_path
from vla_rl.policies.openvla.files.layout import tensor_shapes

if TYPE_CHECKING:
    import torch


def describe(folder: Path) -> CheckpointInfo:
    """Say what the checkpoint in a folder is.

    Raises:
        ValueError: no family knows it, or a file of it is missing or damaged.
    """
    folder = Path(folder)
    for kind in KINDS["policy"]:
        config_class = resolve_kind("policy", kind)
        assert issubclass(config_class, PolicyConfig), f"{config_class} must derive from PolicyConfig"
        if (info := config_class.describe(folder)) is not None:
            for file in sorted(folder.glob("*.safetensors")):
                tensor_shapes(file)  # An error where it is truncated.
            return info
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder / CONFIG_FILE}: not found. A policy folder holds {CONFIG_FILE}, weights and more.")
    raise ValueError(
        f"{folder / CONFIG_FILE}: has no 'kind', and no family knows this folder ({', '.join(KINDS['policy'])}), so "
        "it is neither a policy saved by this package nor a checkpoint that it can read."
    )


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
