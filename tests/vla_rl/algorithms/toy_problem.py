"""A problem that is learnt in seconds: reach a target on a line, with a two-layer categorical policy.

The state is (position, target). A chunk is two actions of one dimension, each one of five moves.
"""

from __future__ import annotations

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
    return [_episode(policy, float(t), int(g), generator, temperature) for t, g in zip(target, groups, strict=True)]


def _episode(policy, target, group, generator, temperature) -> Episode:
    position, step, observations, chunks = 0.0, 0, [], []
    rewards, terminated, truncated, num_steps = [], [], [], []
    done = False
    while not done:
        observations.append(observation([position, target]))
        chunk = policy.act(observations[-1], generator, temperature)
        row = np.zeros((3, H), np.float32)
        for h in range(H):
            position += float(chunk.actions[0, h, 0])
            step += 1
            success = abs(position - target) < 0.2
            row[0, h] = row[1, h] = float(success)
            row[2, h] = float(step == HORIZON and not success)
            done = bool(success or step == HORIZON)
            if done:
                break
        chunks.append(chunk)
        rewards.append(row[0])
        terminated.append(row[1] > 0)
        truncated.append(row[2] > 0)
        num_steps.append(h + 1)
    return Episode(
        spec=EpisodeSpec("reach"),
        obs=Observation.concatenate(observations),
        chunks=ActionChunk.concatenate(chunks),
        reward=np.stack(rewards),
        terminated=np.stack(terminated),
        truncated=np.stack(truncated),
        num_steps=np.array(num_steps, np.int64),
        success=bool(np.stack(terminated).any()),
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
