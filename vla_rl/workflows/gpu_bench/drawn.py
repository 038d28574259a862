"""Stand-ins for what a shipped recipe downloads and earns: weights drawn on the device, and rewards drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vla_rl.policies.fake_input import fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.files.layout import PublishedFolder
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel
from vla_rl.training.memory import skeleton
from vla_rl.types import EnvSpec, Observation
from vla_rl.workflows.gpu_bench.large_policy import fill

DRAWN_KIND = f"{__name__}:DrawnOpenVLAConfig"


class DrawnOpenVLAConfig(OpenVLAConfig):
    """A published OpenVLA whose `path` gives the sizes alone: its weights are drawn on the device, the same for a seed.

    Of the names that `vla-rl plan --memory` knows no file is read; of a folder, the small files and headers. Saved, it
    is adapters on that checkpoint, as the published one would be.
    """

    kind: Literal["vla_rl.workflows.gpu_bench.drawn:DrawnOpenVLAConfig"] = (
        "vla_rl.workflows.gpu_bench.drawn:DrawnOpenVLAConfig"
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> OpenVLAPolicy:
        """See `PolicyConfig.build`."""
        device = torch.device(device)
        policy = skeleton(self, env_spec, device.type)
        policy.to_empty(device=device)
        fill(policy, device, seed)
        policy.set_norm_stats(fake_statistics(policy.action_dim), fake_statistics(env_spec.state_dim, gripper=False))
        policy.published = PublishedFolder(Path(str(self.path)), {}, {}, {}, {})
        policy.check_env(env_spec)
        return policy


class DrawnRewardConfig(RewardConfig):
    """Pays every second episode, at its horizon, whatever it did: so there is something to learn from."""

    kind: Literal["vla_rl.workflows.gpu_bench.drawn:DrawnRewardConfig"] = (
        "vla_rl.workflows.gpu_bench.drawn:DrawnRewardConfig"
    )
    seed: int = 0

    def build(self, spec: EnvSpec) -> RewardModel:
        """See `RewardConfig.build`."""
        return _DrawnReward(max(spec.horizon.values()), self.seed)


class _DrawnReward(RewardModel):
    def __init__(self, horizon: int, seed: int) -> None:
        self.every, self._rng = horizon, np.random.default_rng(seed)

    def observe(
        self,
        obs: Observation,
        streams: Sequence[int],
        begins: Sequence[bool] | np.ndarray,
        told: np.ndarray | None = None,
    ) -> Judgement:
        """See `RewardModel.observe`: asked where an episode begins, and where it ends."""
        counts = ~np.asarray(begins, bool) & (self._rng.random(len(streams)) < 0.5)
        return Judgement(counts.astype(np.float32), counts.astype(np.float32), counts)
