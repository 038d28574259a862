"""A problem that is learnt in seconds: reach a target on a line, with a two-layer categorical policy.

The state is (position, target). A chunk is two actions of one dimension, each one of five moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

H, A, BINS = 2, 1, 5
MOVES = np.array([-0.5, -0.25, 0.0, 0.25, 0.5], np.float32)
HORIZON = 6


class ToyPolicy(nn.Module, Policy):
    """Categorical over BINS moves for each action of the chunk, from the state alone."""

    chunk_size, action_dim, cameras, uses_state = H, A, (), True

    def __init__(self, critic: bool = False, seed: int = 0, hidden: int = 16):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, H * A * BINS)
        self.value_head = nn.Linear(hidden, 1) if critic else None

    def _read(self, obs: Observation, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        features = self.body(torch.from_numpy(obs.state).to(self.out.weight.device))
        logits = self.out(features).view(-1, H, A, BINS) / temperature
        value = None if self.value_head is None else self.value_head(features.detach()).squeeze(-1)
        return logits.log_softmax(-1), value

    @torch.no_grad()
    def act(self, obs, generator=None, temperature=1.0) -> ActionChunk:
        log_probs, value = self._read(obs, temperature)
        flat = log_probs.exp().view(-1, BINS)
        tokens = torch.multinomial(flat, 1, generator=generator).view(-1, H, A)
        log_prob = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        return ActionChunk(
            actions=MOVES[tokens.numpy()],
            tokens=tokens.numpy(),
            log_prob=log_prob.numpy(),
            value=None if value is None else value.numpy(),
        )

    def evaluate(self, obs, chunk, temperature=1.0) -> PolicyOutput:
        log_probs, value = self._read(obs, temperature)
        tokens = torch.from_numpy(chunk.tokens).to(self.out.weight.device)
        log_prob = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        return PolicyOutput(log_prob, -(log_probs.exp() * log_probs).sum(-1), value)


def observation(state: np.ndarray) -> Observation:
    state = np.asarray(state, np.float32).reshape(-1, 2)
    return Observation(images={}, state=state, instruction=["reach"] * len(state))


def roll_out(policy: ToyPolicy, num_groups: int, group_size: int, seed: int, temperature: float = 1.0) -> list[Episode]:
    """Episodes of `num_groups` targets, `group_size` of each: +-1 in turn. Reward 1 within 0.2 of the target."""
    generator = torch.Generator().manual_seed(seed)
    groups = np.repeat(np.arange(num_groups), group_size)
    target = np.where(groups % 2 == 0, 1.0, -1.0)
    position, under_way = np.zeros(len(groups)), np.arange(len(groups))
    decisions: list[list[_Decision]] = [[] for _ in groups]
    for step in range(0, HORIZON, H):
        obs = observation(np.stack([position, target], 1)[under_way])
        chunk = policy.act(obs, generator, temperature)
        after = position[under_way, None] + chunk.actions[..., 0].cumsum(1)
        for row, episode in enumerate(under_way):
            reached = np.abs(after[row] - target[episode]) < 0.2
            num_steps = int(reached.argmax()) + 1 if reached.any() else H
            position[episode] = after[row, num_steps - 1]
            reward = np.zeros((2, H), bool)
            reward[0, num_steps - 1] = reached.any()
            reward[1, num_steps - 1] = step + num_steps == HORIZON and not reached.any()
            decisions[episode].append(_Decision(obs.select([row]), chunk.select([row]), *reward, num_steps))
        under_way = np.array([e for e in under_way if not decisions[e][-1].reached.any()], int)
        if not len(under_way):
            break
    return [_episode(own, position[e], target[e], int(groups[e])) for e, own in enumerate(decisions)]


class _Decision(NamedTuple):
    obs: Observation
    chunk: ActionChunk
    reached: np.ndarray
    truncated: np.ndarray
    num_steps: int


def _episode(decisions: list[_Decision], position: float, target: float, group: int) -> Episode:
    terminated = np.stack([d.reached for d in decisions])
    return Episode(
        spec=EpisodeSpec("reach"),
        obs=Observation.concatenate([d.obs for d in decisions]),
        chunks=ActionChunk.concatenate([d.chunk for d in decisions]),
        reward=terminated.astype(np.float32),
        terminated=terminated,
        truncated=np.stack([d.truncated for d in decisions]),
        num_steps=np.array([d.num_steps for d in decisions], np.int64),
        success=bool(terminated.any()),
        final_obs=observation([position, target]),
        group=group,
    )


def make_episode(
    reward, num_steps, *, truncated: bool = False, group: int = 0, lost: bool = False, seed: int = 0
) -> Episode:
    """An episode with given rewards (K, H) and steps executed (K,); states and tokens are random."""
    reward = np.asarray(reward, np.float32)
    num_steps = np.asarray(num_steps, np.int64)
    num_chunks = len(reward)
    rng = np.random.default_rng(seed)
    cut = np.zeros(reward.shape, bool)
    if truncated:
        cut[-1, num_steps[-1] - 1] = True
    tokens = rng.integers(0, BINS, (num_chunks, H, A))
    log_prob = np.log(rng.uniform(0.1, 0.5, (num_chunks, H, A))).astype(np.float32)
    return Episode(
        spec=EpisodeSpec("reach"),
        obs=observation(rng.normal(size=(num_chunks, 2))),
        chunks=ActionChunk(MOVES[tokens], tokens, None, log_prob),
        reward=reward,
        terminated=reward > 0,
        truncated=cut,
        num_steps=num_steps,
        success=bool((reward > 0).any()),
        final_obs=observation(rng.normal(size=(1, 2))),
        group=group,
        lost=lost,
    )


def success_rate(policy: ToyPolicy, seed: int = 12345) -> float:
    """Over 200 sampled episodes."""
    return float(np.mean([e.success for e in roll_out(policy, 200, 1, seed)]))
