"""Policy that is told the actions under way, and has learned to: training-time real-time chunking.

Black et al. 2025 (arXiv 2512.05964): in cloning, the first d actions of each chunk are given, and the loss is of the
others; d is drawn evenly from 0 to the longest delay. On a robot those that are played while a chunk is computed are
given. Theirs is a flow policy, in which given actions have no noise. Here it is OpenVLA's parallel decoder: at the
positions of given actions, their tokens' rows of the output layer are added to the placeholders. Nothing is added to
the weights. (The tokens' own embeddings, of which such a decoder has learned none, were still ignored after 300
updates; the output layer's rows are alike where actions are.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.policies import lora
from vla_rl.policies.base import CONFIG_FILE, CheckpointInfo, PolicyConfig, read_json, resolve_path
from vla_rl.policies.checkpoint_files import write_folder
from vla_rl.policies.load import describe
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.types import ActionChunk, ActionPrefix, EnvSpec, Observation

KIND, BASE_FOLDER = "prefix_conditioned", "base"
NO_RL = (
    "in its rollouts nothing moves while a chunk is computed, so RL would train it without given actions alone. Train "
    "the OpenVLA policy first, then clone with policy.kind=prefix_conditioned"
)


class PrefixConditionedPolicy(OpenVLAPolicy):
    """An OpenVLA policy whose first actions can be given. By `act` it acts as any other.

    Attributes:
        max_delay: most actions that are given in cloning, and the most that are minded in acting.
    """

    max_delay: int
    _given: Tensor | None = None  # int64 (B,), how many actions of each row are; None: as any other.

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """`OpenVLAPolicy.bc_loss` of the actions that are not given; in evaluation mode, rows are given 0, 1, ..."""
        rows, most = len(actions), self.max_delay + 1
        delays = torch.randint(most, (rows,)) if self.training else torch.arange(rows) % most
        counted = np.arange(actions.shape[1]) >= delays.numpy()[:, None]
        with self._telling(delays):
            return super().bc_loss(obs, actions, counted if valid is None else counted & valid, keyframe)

    @torch.no_grad()
    @lora.acts_merged
    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        """The greedy chunk that goes on from the frozen actions, which it begins with. See `ContinuingPolicy`.

        Raises:
            ValueError: a prefix of another shape, or more frozen actions than it has.
        """
        size, given = self.chunk_size, prefix.actions
        prefix.check(obs.batch_size, size, self.action_dim)
        frozen, told = given[:, : prefix.num_frozen], min(prefix.num_frozen, self.max_delay)
        whole = np.concatenate([frozen, np.zeros((len(given), size - prefix.num_frozen, self.action_dim))], 1)
        tokens = self.action_tokenizer.encode(self._from_env(whole.astype(np.float32), self._stats()))
        with self._telling(torch.full((len(given),), told)):
            _, logits = self._read(obs, torch.from_numpy(tokens).to(self.device).flatten(1))
        drawn = self._shape(logits.argmax(-1)).cpu().numpy()
        actions = self._to_env(self.action_tokenizer.decode(drawn), self._stats())
        actions[:, : prefix.num_frozen] = frozen
        return ActionChunk(actions)

    @contextmanager
    def _telling(self, delays: Tensor) -> Iterator[None]:
        """Inside the block the network is told the first actions of the tokens that it reads, `delays` of each row."""
        self._given = delays.to(self.device)
        try:
            yield
        finally:
            self._given = None

    def _hidden(self, obs: Observation, tokens: Tensor | None) -> Tensor:
        if self._given is None or tokens is None:
            return super()._hidden(obs, tokens)
        if torch.is_grad_enabled():
            lora.forget_merged(self)
        with self._autocast():
            prefix, slots = self._prefix(obs), self.network.placeholders(obs.batch_size)
            places = torch.arange(tokens.shape[1], device=self.device)
            given = (places < self._given[:, None] * self.action_dim)[..., None]
            first, last = self.network._first_action_id, self.architecture.llm.vocab_size
            meanings = F.embedding(tokens, self.network.language_model.lm_head.weight[first:last]).to(slots.dtype)
            told = slots[:, : tokens.shape[1]] + meanings * given
            slots = torch.cat((told, slots[:, tokens.shape[1] :]), 1)
            return self.network._run(prefix, slots, False, self.architecture.num_action_tokens)

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the policy in a folder, and its longest delay beside it; all appears whole or not at all."""

        def write(partial: Path) -> None:
            super(PrefixConditionedPolicy, self).save(partial / BASE_FOLDER, dtype)
            (partial / CONFIG_FILE).write_text(json.dumps({"kind": KIND, "max_delay": self.max_delay}, indent=2))

        write_folder(folder, write)


class PrefixConditionedConfig(PolicyConfig):
    """An OpenVLA policy (decoder parallel) that learns, in cloning, to go on from the actions under way."""

    kind: Literal["prefix_conditioned"] = "prefix_conditioned"
    max_delay: PositiveInt | None = Field(
        default=None,
        description="Longest delay in control steps that it learns to bridge; how many actions it is given is drawn "
        "evenly from 0 to that. Empty: as it was saved.",
    )

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> PrefixConditionedPolicy:
        """See `PolicyConfig.build`."""
        if self.path is None:
            raise ConfigError(
                "policy.path: empty, but a prefix_conditioned policy starts from a cloned one; first clone with "
                "policy.kind=openvla, then give that folder"
            )
        policy = _load(resolve_path(self.path), device, seed, self.max_delay, env_spec.action_dim)
        policy.check_env(env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> PrefixConditionedPolicy:
        """See `PolicyConfig.load`."""
        return _load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        file = folder / CONFIG_FILE
        if not file.is_file() or read_json(file).get("kind") != KIND:
            return None
        base = describe(folder / BASE_FOLDER)
        return CheckpointInfo(
            family=f"{base.family}, which goes on from the actions under way",
            kind=KIND,
            facts={**base.facts, "longest delay": f"{_saved_delay(folder)} actions"},
            norm_keys=base.norm_keys,
            rl_reason=NO_RL,
        )


def _load(
    folder: Path, device: str | torch.device, seed: int = 0, chosen: int | None = None, action_dim: int | None = None
) -> PrefixConditionedPolicy:
    """The policy in a folder of this kind's, or of OpenVLA's.

    Raises:
        ConfigError: no delay, one of a whole chunk, or another decoder than the parallel one.
        ValueError: a file is missing or damaged.
    """
    ours = (folder / BASE_FOLDER).is_dir()
    max_delay = _saved_delay(folder) if chosen is None and ours else chosen
    policy = PrefixConditionedPolicy.load(
        folder / BASE_FOLDER if ours else folder,
        device,
        seed,
        for_training=action_dim is not None,
        action_dim=action_dim,
    )
    decoder, size = policy.architecture.decoder, policy.architecture.chunk_size
    if decoder != "parallel":
        raise ConfigError(
            f"policy.path: {folder} decodes by {decoder!r}; only 'parallel' can be given its first actions"
        )
    if max_delay is None or max_delay >= size:
        raise ConfigError(f"policy.max_delay: got {max_delay}, must be 1 to {size - 1} (of a chunk's {size} actions)")
    policy.max_delay, policy.no_rl_reason = max_delay, NO_RL
    return policy


def _saved_delay(folder: Path) -> int:
    """The longest delay in a policy folder.

    Raises:
        ValueError: the file is missing or damaged.
    """
    delay = read_json(folder / CONFIG_FILE).get("max_delay")
    if not isinstance(delay, int) or delay < 1:
        raise ValueError(f"{folder / CONFIG_FILE}: max_delay is {delay!r}, must be at least 1. Copy the folder again.")
    return delay


METHOD = PrefixConditionedConfig
