"""Recognition of a checkpoint folder: its policy family, and what can be done with it.

Every kind of policy is asked (`PolicyConfig.describe`). It reads JSON and headers only, so that looking costs nothing.
"""

from __future__ import annotations

from pathlib import Path

from vla_rl.config import KINDS, resolve_kind
from vla_rl.policies.base import CONFIG_FILE, PolicyConfig
from vla_rl.policies.checkpoint_info import CheckpointInfo
from vla_rl.policies.openvla.files.layout import tensor_shapes


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
