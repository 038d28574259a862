"""A policy that was told of each decision whether it was better than expected, and acts as after a better one.

RECAP of pi*0.6 (arXiv 2511.14759): its instruction ends in "Advantage: positive", which it adds by itself. Guidance
draws from pi(a | o) (pi(a | o, positive) / pi(a | o))^weight, of logits or of a flow's velocity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.advantage_words import with_words
from vla_rl.config import ConfigError
from vla_rl.interfaces import ContinuingPolicy, Policy, PolicyOutput
from vla_rl.policies.base import CONFIG_FILE
from vla_rl.policies.checkpoint_files import write_folder
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.types import ActionChunk, ActionPrefix, Observation

KIND, BASE_FOLDER = "advantage_conditioned", "base"
GUIDED_REASON = (
    "it acts by guidance (policy.guidance={:g}), of which no likelihood is computed. RL can train it with "
    "policy.guidance=1, where the word alone guides it"
)


class AdvantageConditionedPolicy(nn.Module, Policy):
    """A policy with the positive word in its instruction. Make one with `condition`.

    What is cloned by it has the word too: a demonstration is worth repeating.

    Args:
        base: which has learned what the words mean.
        guidance: the weight; 1: only the word; 0: as without it; more: farther from what it does without.

    Raises:
        ConfigError: guidance of a policy that has none.
    """

    def __init__(self, base: Policy, guidance: float = 1.0) -> None:
        super().__init__()
        self.base = base
        self.chunk_size, self.action_dim, self.cameras = base.chunk_size, base.action_dim, base.cameras
        self.uses_state, self.state_dim, self.image_size = base.uses_state, base.state_dim, base.image_size
        self.demonstration_size = base.demonstration_size
        self.sharding_dtype, self.saves_sharded = base.sharding_dtype, base.saves_sharded
        self.guidance = guidance
        if guidance != 1:
            reason = base.no_guidance_reason if isinstance(base, GuidablePolicy) else "it has no logits or velocity"
            if reason is not None:
                raise ConfigError(f"guidance: got {guidance:g}, but {type(base).__name__} cannot be guided: {reason}")
        self.no_rl_reason = base.no_rl_reason if guidance == 1 else GUIDED_REASON.format(guidance)
        self.has_one_likelihood = base.has_one_likelihood

    @property
    def norm_stats(self) -> Any:
        """The base's."""
        return self.base.norm_stats

    @property
    def device(self) -> torch.device:
        """Where the base's weights lie."""
        return self.base.device

    def prepare(self, obs: Observation) -> Observation:
        """The base's. See `Policy.prepare`."""
        return self.base.prepare(obs)

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """The base's chunk after the positive word, guided. See `Policy.act`."""
        obs = self.prepare(obs)
        told = with_words(obs, True)
        if self.guidance == 1:
            return self.base.act(told, generator, temperature)
        assert isinstance(self.base, GuidablePolicy), "checked when it was made"
        return self.base.act_guided(told, [obs], self.guidance, generator, temperature)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """The base's, after the positive word. See `Policy.evaluate`.

        Raises:
            ValueError: with guidance, of which there is no likelihood.
        """
        if self.guidance != 1:
            raise ValueError(f"RL cannot train this policy: {self.no_rl_reason}")
        return self.base.evaluate(with_words(obs, True), chunk, temperature)

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The base's, after the positive word. See `Policy.bc_loss`."""
        return self.base.bc_loss(with_words(obs, True), actions, valid, keyframe)

    def embed(self, obs: Observation) -> torch.Tensor:
        """The base's features, without a word."""
        return self.base.embed(obs)

    def set_norm_stats(
        self, action: Mapping[str, Any], state: Mapping[str, Any] | None = None, name: str = "dataset"
    ) -> None:
        """The base's."""
        self.base.set_norm_stats(action, state, name)

    def sharding_units(self) -> list[nn.Module]:
        """The base's."""
        return self.base.sharding_units()

    def save(self, folder: Path) -> None:
        """Write the base in a folder, and the guidance beside it; all appears whole or not at all."""

        def write(partial: Path) -> None:
            self.base.save(partial / BASE_FOLDER)
            (partial / CONFIG_FILE).write_text(json.dumps({"kind": KIND, "guidance": self.guidance}, indent=2))

        write_folder(folder, write)


class ContinuingConditionedPolicy(AdvantageConditionedPolicy):
    """One whose base can continue actions under way, by the word alone."""

    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        """The base's, after the positive word. See `ContinuingPolicy`."""
        assert isinstance(self.base, ContinuingPolicy), "of such a policy alone"
        return self.base.act_with_prefix(with_words(obs, True), prefix, generator)


def condition(base: Policy, guidance: float = 1.0) -> AdvantageConditionedPolicy:
    """A policy with the positive word in its instruction.

    Raises:
        ConfigError: guidance of a policy that has none.
    """
    continues = isinstance(base, ContinuingPolicy) and guidance == 1
    return (ContinuingConditionedPolicy if continues else AdvantageConditionedPolicy)(base, guidance)


def unconditioned(policy: Policy) -> Policy:
    """The policy itself, or what is within one that has the positive word in its instruction."""
    return policy.base if isinstance(policy, AdvantageConditionedPolicy) else policy
