"""OpenVLA at its own size with random weights, made on the device: no file is read, and no copy is on the host.

Also stand-ins for what a shipped recipe downloads and earns: weights drawn on the device, and rewards drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.files.layout import PublishedFolder
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel
from vla_rl.training.memory import skeleton
from vla_rl.types import ActionChunk, EnvSpec, Observation

LORA = {"lora": {"rank": 32}, "trainable": "lora"}
PARALLEL = {"decoder": "parallel", "chunk_size": 8}  # OpenVLA-OFT's chunks, 56 tokens at once.
AUTOREGRESSIVE = {"decoder": "autoregressive", "chunk_size": 1}  # OpenVLA's, 7 tokens one after the other.
STD = 0.02


def options(is_full: bool, **chosen: Any) -> OpenVLAConfig:
    """The policy's options: 7 billion parameters, or at tiny size the smallest preset."""
    return OpenVLAConfig.model_validate(
        {"preset": "7b" if is_full else "tiny", "precision": "bf16", "attention": "sdpa", **chosen}
    )


def spec_of(config: OpenVLAConfig) -> EnvSpec:
    """An environment with images of the policy's own size, so that none is resized."""
    return fake_env_spec(image_size=224 if config.preset == "7b" else 64)


def without_values(config: OpenVLAConfig, device_type: str) -> OpenVLAPolicy:
    """The policy on the meta device, with the dtypes of a checkpoint that is loaded: frozen weights in bfloat16."""
    policy = skeleton(config, spec_of(config), device_type)
    trained = policy.trained_names()
    for name, parameter in policy.network.named_parameters():
        if name not in trained:
            parameter.data = parameter.data.bfloat16()
    return policy


def on_device(config: OpenVLAConfig, device: torch.device, seed: int = 0) -> OpenVLAPolicy:
    """The policy with weights from `seed`, drawn on the device itself where it is a GPU."""
    policy = without_values(config, device.type)
    policy.to_empty(device=device)
    fill(policy, device, seed)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


@torch.no_grad()
def fill(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give every parameter values: matrices N(0, 0.02), norms and scales 1, biases 0."""
    own = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(own).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif own == device:
            parameter.normal_(0.0, STD, generator=generator)
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, STD, generator=generator))


def observations(policy: OpenVLAPolicy, batch_size: int) -> Observation:
    """Made-up inputs, of one instruction so that no row is padded."""
    spec = spec_of(cast(OpenVLAConfig, policy.config))
    return fake_observation(spec, batch_size, instructions=[next(iter(spec.tasks.values()))])


def drawn_chunk(policy: OpenVLAPolicy, batch_size: int) -> ActionChunk:
    """A chunk of random tokens, to evaluate."""
    shape = (batch_size, policy.chunk_size, policy.action_dim)
    tokens = np.random.default_rng(0).integers(0, policy.architecture.action_bins, shape)
    return ActionChunk(np.zeros(shape, np.float32), tokens=tokens)


DRAWN_KIND = f"{__name__}:DrawnOpenVLAConfig"


class DrawnOpenVLAConfig(OpenVLAConfig):
    """A published OpenVLA whose `path` gives the sizes alone: its weights are drawn on the device, the same for a seed.

    Of the names that `vla-rl plan --memory` knows no file is read; of a folder, the small files and headers. Saved, it
    is adapters on that checkpoint, as the published one would be.
    """

    kind: Literal["vla_rl.workflows.gpu_bench.large_policy:DrawnOpenVLAConfig"] = (
        "vla_rl.workflows.gpu_bench.large_policy:DrawnOpenVLAConfig"
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

    kind: Literal["vla_rl.workflows.gpu_bench.large_policy:DrawnRewardConfig"] = (
        "vla_rl.workflows.gpu_bench.large_policy:DrawnRewardConfig"
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
