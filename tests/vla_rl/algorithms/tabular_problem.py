"""A tree of two decisions, small enough to enumerate: what an unbiased gradient must be on average.

The first chunk, two moves of 0 or 1, leads to state 1 (equal moves) or 2. Of the second chunk only the first move is
executed: then the episode ends, won with a probability that depends on all three moves.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.base import ActionValuesConfig
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

H = 2
LOGITS = np.array([[[0.4, 0.0], [0.0, 0.3]], [[0.0, 0.5], [0.2, 0.0]], [[0.6, 0.0], [0.0, 0.1]]], np.float32)
WINS = np.array([[0.02, 0.1], [0.05, 0.98], [0.0, 0.1], [1.0, 0.9]])  # [first chunk, executed move of the second]
WRONG = np.random.default_rng(5).normal(0.5, 0.6, (3, 4))  # [state, chunk], unexecuted moves and all


class TablePolicy(nn.Module, Policy):
    """A softmax over the moves of each state."""

    chunk_size, action_dim, cameras, uses_state = H, 1, (), True

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.from_numpy(LOGITS.copy()))

    def _log_probs(self, obs: Observation) -> torch.Tensor:
        return self.logits[torch.from_numpy(obs.state[:, 0]).long()].log_softmax(-1)

    @torch.no_grad()
    def act(self, obs, generator=None, temperature=1.0) -> ActionChunk:
        log_probs = self._log_probs(obs)
        tokens = torch.multinomial(log_probs.exp().view(-1, 2), 1, generator=generator).view(-1, H, 1)
        log_prob = log_probs.gather(-1, tokens)
        return ActionChunk(tokens.numpy().astype(np.float32), tokens.numpy(), log_prob=log_prob.numpy())

    def evaluate(self, obs, chunk, temperature=1.0) -> PolicyOutput:
        log_probs = self._log_probs(obs)
        log_prob = log_probs.gather(-1, torch.from_numpy(chunk.tokens))
        return PolicyOutput(log_prob, -(log_probs.exp() * log_probs).sum(-1, keepdim=True))


def chunk_number(moves: np.ndarray) -> np.ndarray:
    """Of moves (..., 2, 1), int (...)."""
    return (2 * moves[..., 0, 0] + moves[..., 1, 0]).astype(int)


def state_after(first: np.ndarray) -> np.ndarray:
    return np.where((first == 0) | (first == 3), 1, 2)


def roll_out(policy: TablePolicy, num_groups: int, group_size: int, seed: int) -> list[Episode]:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    count = num_groups * group_size

    def seen(state: np.ndarray) -> Observation:
        return Observation({}, state[:, None].astype(np.float32), ["go"] * len(state))

    root = seen(np.zeros(count))
    first = policy.act(root, generator)
    obs = seen(state_after(chunk_number(first.actions)))
    second = policy.act(obs, generator)
    chance = WINS[chunk_number(first.actions), second.actions[:, 0, 0].astype(int)]
    return [
        _episode(
            Observation.concatenate([root.row(i), obs.row(i)]),
            ActionChunk.concatenate([first.select([i]), second.select([i])]),
            bool(rng.random() < chance[i]),
            i // group_size,
        )
        for i in range(count)
    ]


def _episode(obs: Observation, chunks: ActionChunk, won: bool, group: int) -> Episode:
    ended = np.zeros((2, H), bool)
    ended[1, 0] = True
    return Episode(
        EpisodeSpec("tree"),
        obs,
        chunks,
        reward=(ended & won).astype(np.float32),
        terminated=ended & won,
        truncated=ended & ~np.array(won),
        num_steps=np.array([2, 1]),
        success=won,
        final_obs=obs.select([1]),
        group=group,
    )


def exact_gradient() -> torch.Tensor:
    """Of the chance to win, by enumeration."""
    policy = TablePolicy()
    p = policy.logits.softmax(-1)
    total = torch.zeros(())
    for a, b, last in itertools.product((0, 1), repeat=3):
        first = 2 * a + b
        second = p[int(state_after(np.array(first))), 0, last]
        total = total + p[0, 0, a] * p[0, 1, b] * second * float(WINS[first, last])
    total.backward()
    assert policy.logits.grad is not None
    return policy.logits.grad


def right_values() -> np.ndarray:
    """[state, chunk] at the root, and at the leaves [first chunk, chunk] in rows 1 to 4; exact under LOGITS."""
    p = torch.from_numpy(LOGITS).softmax(-1).numpy()
    leaves = np.repeat(WINS, 2, axis=1)  # The second move of a leaf's chunk changes nothing.
    root = [p[state_after(np.array(first)), 0] @ WINS[first] for first in range(4)]
    return np.vstack([np.array(root)[None], leaves])


class PlantedConfig(ActionValuesConfig):
    """Values of a known kind: right, wrong, constant, of the state alone, or the outcome itself, which is cheating."""

    kind: str = "tabular_problem:PlantedConfig"
    which: str = "right"

    def build(self, policy: Any, device: str = "cpu") -> PlantedValues:
        return PlantedValues(self.which)


class PlantedValues:
    def __init__(self, which: str):
        self.which, self.table = which, right_values()

    def of(self, episodes, episode, chunk, actions) -> np.ndarray:
        number = chunk_number(actions)
        state = np.array([episodes[e].obs.state[c, 0] for e, c in zip(episode, chunk, strict=True)]).astype(int)
        first = np.array([chunk_number(episodes[e].chunks.actions[0]) for e in episode])
        right = self.table[np.where(chunk == 0, 0, 1 + first)[:, None], number]
        outcome = np.array([episodes[e].total_reward for e in episode])[:, None]
        return {
            "right": right,
            "outcome": np.where(number == number[:, :1], outcome, 0.5),  # Of the executed chunk; of others, nothing.
            "wrong": WRONG[state[:, None], number],
            "constant": np.full(number.shape, 0.5),
            "state": np.repeat(WRONG[state, :1], number.shape[1], 1),
        }[self.which]
