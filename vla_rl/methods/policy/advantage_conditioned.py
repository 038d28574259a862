"""Advantage-conditioned policy: acts as after decisions that were better than expected.

RECAP of pi*0.6 (arXiv 2511.14759): its instruction ends in "Advantage: positive", which it adds by itself. Guidance
draws from pi(a | o) (pi(a | o, positive) / pi(a | o))^weight, of logits or of a flow's velocity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat
from torch import nn

from vla_rl.config import ConfigError
from vla_rl.interfaces import ContinuingPolicy, Policy, PolicyOutput
from vla_rl.policies.base import CONFIG_FILE, CheckpointInfo, PolicyConfig, check_sizes, read_json, resolve_path
from vla_rl.policies.checkpoint_files import write_folder
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.policies.load import describe, load_policy
from vla_rl.types import ActionChunk, ActionPrefix, EnvSpec, Observation

WORDS = ("negative", "positive")
KIND, BASE_FOLDER = "advantage_conditioned", "base"
GUIDED_REASON = (
    "it acts by guidance (policy.guidance={:g}), of which no likelihood is computed. RL can train it with "
    "policy.guidance=1, where the word alone guides it"
)


def with_words(obs: Observation, positive: Sequence[bool] | np.ndarray | bool) -> Observation:
    """The same with "Advantage: positive" or "Advantage: negative" at the instruction's end; bool (B,), or one."""
    wanted = np.broadcast_to(positive, obs.batch_size)
    return replace(
        obs,
        instruction=[
            f"{text.rstrip('. ')}. Advantage: {WORDS[int(word)]}"
            for text, word in zip(obs.instruction, wanted, strict=True)
        ],
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


class AdvantageConditionedConfig(PolicyConfig):
    """A policy that knows which of its decisions were better than expected, as `offline.kind=recap` saves it."""

    kind: Literal["advantage_conditioned"] = "advantage_conditioned"
    guidance: NonNegativeFloat | None = Field(
        default=None,
        description="Weight of classifier-free guidance: 1: only the positive word; 0: as without it; more: farther "
        "from what it does without. Empty: as it was saved.",
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> AdvantageConditionedPolicy:
        """See `PolicyConfig.build`."""
        if self.path is None:
            raise ConfigError(
                "policy.path: an advantage_conditioned policy is made by `run: offline` with offline.kind=recap; "
                "give the folder it saved"
            )
        policy = self._load(resolve_path(self.path), device, self.guidance)
        if lacking := sorted(set(policy.cameras) - set(env_spec.cameras)):
            raise ConfigError(f"policy.cameras: {lacking} not in environment {env_spec.kind!r}; set env.cameras")
        check_sizes(policy, env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> AdvantageConditionedPolicy:
        """See `PolicyConfig.load`."""
        return cls._load(Path(folder), device, None)

    @classmethod
    def _load(cls, folder: Path, device: str | torch.device, guidance: float | None) -> AdvantageConditionedPolicy:
        return condition(load_policy(folder / BASE_FOLDER, device), _saved(folder) if guidance is None else guidance)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        file = folder / CONFIG_FILE
        if not file.is_file() or read_json(file).get("kind") != KIND:
            return None
        guidance, base = _saved(folder), describe(folder / BASE_FOLDER)
        guided = f"it acts by guidance ({guidance:g}); RL can train it with policy.guidance=1"
        return CheckpointInfo(
            family="policy with the positive advantage word in its instruction, saved by `run: offline`",
            kind=KIND,
            facts={"guidance": f"{guidance:g}", "base": f"{base.family}, in {folder / BASE_FOLDER}"},
            rl=base.rl if guidance == 1 else (),
            rl_reason=base.rl_reason if guidance == 1 else guided,
        )


def _saved(folder: Path) -> float:
    """The guidance in a policy folder.

    Raises:
        ValueError: the file is missing or damaged.
    """
    guidance = read_json(folder / CONFIG_FILE).get("guidance")
    if not isinstance(guidance, int | float) or not guidance >= 0:
        raise ValueError(
            f"{folder / CONFIG_FILE}: guidance is {guidance!r}, must be a number of at least 0. Copy the folder again."
        )
    return float(guidance)


METHOD = AdvantageConditionedConfig
