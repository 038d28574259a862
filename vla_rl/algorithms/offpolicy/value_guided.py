"""Value-guided policy: of several chunks of a frozen policy, the one that a critic prefers.

The critic is fitted on what came of episodes; the policy's own weights are never touched, so that it works for any
that embeds what it sees (IDQL, arXiv 2304.10573; V-GPS, arXiv 2410.13816). An edit policy may add changed chunks to
those judged (EXPO, arXiv 2507.07986).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import ChooseBy
from vla_rl.algorithms.offpolicy.networks import CriticNetworks, EditPolicy
from vla_rl.common.row_noise import RowGenerator, by_row
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.policies.base import CONFIG_FILE
from vla_rl.policies.checkpoint_files import read_weights, write_folder, write_weights
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk, Observation

BASE_FOLDER = "base"
NO_RL_REASON = (
    "its base is frozen, and a critic chooses among the base's chunks. Improve it by `run: online`, or train its "
    "base (policy.path=FOLDER/base)"
)


@runtime_checkable
class SeveralChunksPolicy(Protocol):
    """A policy that embeds an observation and draws several chunks for it in one pass of its network.

    Attributes:
        draws_at_once: whether it does, as it is set up.
    """

    draws_at_once: bool

    def embed_and_draw(
        self, obs: Observation, count: int, generator: torch.Generator | None, temperature: float
    ) -> tuple[torch.Tensor, np.ndarray]:
        """See `embed_and_draw`, with count >= 2."""
        ...


@torch.no_grad()
def embed_and_draw(
    policy: Policy, obs: Observation, count: int, generator: torch.Generator | None, temperature: float
) -> tuple[torch.Tensor, np.ndarray]:
    """Embed observations, and draw chunks for each: the greedy one first, then `count` - 1 at the temperature.

    Returns:
        Features (B, D), and chunks float32 (B, count, H, A) in the environment's units.
    """
    if count > 1 and isinstance(policy, SeveralChunksPolicy) and policy.draws_at_once:
        return policy.embed_and_draw(obs, count, generator, temperature)
    obs = policy.prepare(obs)
    drawn = [policy.act(obs, None, 0.0).actions[:, None]]
    if count > 1:
        rows = np.repeat(np.arange(obs.batch_size), count - 1)
        several = generator.select(rows.tolist()) if isinstance(generator, RowGenerator) else generator
        actions = policy.act(obs.select(rows), several, temperature).actions
        drawn.append(actions.reshape(obs.batch_size, count - 1, *actions.shape[1:]))
    return policy.embed(obs), np.concatenate(drawn, 1)


@dataclass(frozen=True)
class Judgement:
    """What was considered at B observations, and chosen.

    Attributes:
        features: float32 (B, D). chunks: float32 (B, N, H, A), the greedy one first. value: float32 (B, N), each
            chunk's, the smallest of the ensemble's. best: int64 (B,), which one is executed.
    """

    features: np.ndarray
    chunks: np.ndarray
    value: np.ndarray
    best: np.ndarray


class ValueGuidedPolicy(nn.Module, Policy):
    """At each observation, the best of several chunks of a frozen policy, by an ensemble's Q.

    Args:
        base: the frozen policy.
        critic: its Q judges; no other use is made of it.
        editor: changes each candidate a little, and both are judged; None: the base's own alone.
        candidates: chunks of the base's at each observation, its greedy one among them.
        choose_by: which of the chunks acts, see `choose`.
    """

    def __init__(
        self,
        base: Policy,
        critic: CriticNetworks,
        editor: EditPolicy | None,
        candidates: int,
        choose_by: ChooseBy = "lead",
    ) -> None:
        super().__init__()
        self.base, self.critic, self.editor = base, critic, editor
        self.candidates = candidates
        self.choose_by: ChooseBy = choose_by
        self.chunk_size, self.action_dim, self.cameras = base.chunk_size, base.action_dim, base.cameras
        self.uses_state, self.state_dim, self.image_size = base.uses_state, base.state_dim, base.image_size
        self.norm_stats = base.norm_stats
        self.no_rl_reason = NO_RL_REASON

    @property
    def device(self) -> torch.device:
        """Where the base's weights lie."""
        return self.base.device

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """The best chunk of each row.

        At temperature 0 the candidates are drawn with the same noise each time, so that the same observation gets the
        same chunk; else by the generator, at this temperature.
        """
        if temperature == 0:
            generator, temperature = _same_noise(obs.batch_size), 1.0
        found = self.judge(obs, generator, temperature)
        rows = np.arange(obs.batch_size)
        return ActionChunk(found.chunks[rows, found.best], value=found.value[rows, found.best])

    @torch.no_grad()
    def judge(self, obs: Observation, generator: torch.Generator | None, temperature: float) -> Judgement:
        """Draw candidates for each observation and judge them."""
        features, drawn = embed_and_draw(self.base, obs, self.candidates, generator, temperature)
        place = self.critic.place_of(features)
        chunk = self.critic.normal_chunk(torch.from_numpy(drawn).to(place.device).flatten(2))
        if self.editor is not None:
            where = place[:, None].expand(-1, chunk.shape[1], -1)
            noise = by_row(_normal, chunk.shape, generator).to(place.device)
            edited, _ = self.editor(self.critic, where, chunk, noise)
            chunk = torch.cat([chunk, edited], 1)
            drawn = self.critic.chunk_of(chunk).reshape(len(drawn), -1, *drawn.shape[2:]).cpu().numpy()
        values = self.critic.q_values(place, chunk).cpu()
        best = choose(values, self.choose_by)
        return Judgement(features.float().cpu().numpy(), drawn, values.min(0).values.numpy(), best.numpy())

    def embed(self, obs: Observation) -> torch.Tensor:
        """The base's features."""
        return self.base.embed(obs)

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Not for RL by likelihoods: see `no_rl_reason`."""
        raise NotImplementedError(NO_RL_REASON)

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Not for cloning: the base is."""
        raise NotImplementedError(NO_RL_REASON)

    def save(self, folder: Path) -> None:
        """Write the base, and the networks beside it; the folder appears whole or not at all."""

        def write(partial: Path) -> None:
            self.base.save(partial / BASE_FOLDER)
            write_weights(partial, self._added(), self._facts(), None)

        write_folder(folder, write)

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> ValueGuidedPolicy:
        """What `save` wrote.

        Raises:
            ValueError: the folder is incomplete or damaged.
        """
        facts = json.loads((folder / CONFIG_FILE).read_text())
        policy = cls._of(load_policy(folder / BASE_FOLDER, device), CriticNetworks.empty(**facts["critic"]), facts)
        read_weights(folder, policy._added())
        policy.requires_grad_(False)
        return policy.to(device)

    @classmethod
    def _of(cls, base: Policy, critic: CriticNetworks, facts: dict[str, Any]) -> ValueGuidedPolicy:
        """What `_facts` describes, with fresh networks."""
        editor = EditPolicy(**facts["editor"]) if facts["editor"] else None
        return cls(base, critic, editor, facts["candidates"], facts["choose_by"])

    def _added(self) -> nn.ModuleDict:
        """What is there besides the base."""
        return nn.ModuleDict({"critic": self.critic} | ({"editor": self.editor} if self.editor is not None else {}))

    def _facts(self) -> dict[str, Any]:
        return {
            "kind": "value_guided",
            "candidates": self.candidates,
            "choose_by": self.choose_by,
            "critic": self.critic.facts,
            "editor": self.editor.facts if self.editor is not None else None,
        }


def choose(values: torch.Tensor, by: ChooseBy) -> torch.Tensor:
    """Which of N chunks acts, int64 (B,), the first being the greedy one.

    By lead: the one that all networks prefer to the greedy one, by the largest of the smallest differences; where there
    is none, the greedy one. What a network believes of the place cancels in a difference. By value: the largest of the
    smallest values (IDQL), so that the network that thinks least of the place decides alone.

    Args:
        values: float (members, B, N), each network's Q.
    """
    return ((values - values[..., :1]) if by == "lead" else values).min(0).values.argmax(1)


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=None if generator is None else generator.device)


def _same_noise(rows: int) -> RowGenerator:
    """A generator that gives each row the same numbers, whatever other rows there are, on whatever device."""
    noise = RowGenerator()
    noise.manual_seed(0)
    noise.rows = [torch.Generator().manual_seed(0) for _ in range(rows)]
    return noise
