"""The OpenVLA policy as a recipe names it: options, and how it is built, loaded and recognized. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.policies.base import resolve_path
from vla_rl.policies.checkpoint_info import CheckpointInfo
from vla_rl.policies.openvla.inspect import describe
from vla_rl.policies.openvla.options import OpenVLAOptions
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.openvla.policy import OpenVLAPolicy


class OpenVLAConfig(OpenVLAOptions):
    """A policy of the OpenVLA architecture (arXiv:2406.09246) or OpenVLA-OFT's discrete one (arXiv:2502.19645)."""

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> OpenVLAPolicy:
        """See `PolicyConfig.build`."""
        from vla_rl.policies.openvla.policy import OpenVLAPolicy

        if self.path is None:
            policy = OpenVLAPolicy.create(self, env_spec, device, seed)
        else:
            chosen = {name: getattr(self, name) for name in self.model_fields_set}
            size = env_spec.action_dim
            policy = OpenVLAPolicy.load(
                resolve_path(self.path), device, seed, chosen, for_training=True, action_dim=size
            )
        policy.check_env(env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> OpenVLAPolicy:
        """See `PolicyConfig.load`."""
        from vla_rl.policies.openvla.policy import OpenVLAPolicy

        return OpenVLAPolicy.load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        return describe(folder)
