"""Candidate chunks: several draws of a policy at one observation, with its embedding, for a critic to choose among."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from vla_rl.common.row_noise import RowGenerator
from vla_rl.interfaces import Policy
from vla_rl.types import Observation


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
