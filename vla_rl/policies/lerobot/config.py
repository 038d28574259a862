"""Policies of LeRobot as a recipe names them: options, and how they are built, loaded and recognized. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.policies.base import resolve_path
from vla_rl.policies.checkpoint_info import CheckpointInfo
from vla_rl.policies.lerobot.inspect import describe
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.lerobot.policy import LeRobotPolicy


class LeRobotConfig(LeRobotOptions):
    """A policy of LeRobot's: those of `RL_TYPES` act, clone and learn by RL; any other is evaluated and deployed."""

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> LeRobotPolicy:
        """See `PolicyConfig.build`."""
        from vla_rl.policies.lerobot.files import create, load

        if self.path is None:
            policy = create(self, env_spec, device, seed)
        else:
            chosen = {name: getattr(self, name) for name in self.model_fields_set}
            policy = load(resolve_path(self.path), device, seed=seed, chosen=chosen)
        policy.check_env(env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> LeRobotPolicy:
        """See `PolicyConfig.load`."""
        from vla_rl.policies.lerobot.files import load

        return load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        return describe(folder)
