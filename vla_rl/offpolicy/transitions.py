"""Logged episodes as decisions: what the policy saw (its embedding), the chunk that followed, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.data.dataset import BCDataset, EpisodeDataset
from vla_rl.interfaces import Policy

_BATCH = 256  # Observations embedded together.


@dataclass(frozen=True)
class Transitions:
    """N decisions of E logged episodes.

    Attributes:
        embedding: float32 (N, D), the policy's features of what was seen.
        chunk: float32 (N, H, A), the actions that followed; past the episode's end its last one.
        num_steps: int64 (N,), control steps of the chunk that the episode has, 1 .. H.
        following: int64 (N,), the decision after the chunk; -1 where the episode ends within it or none is logged.
        elapsed, remaining: int64 (N,), control steps of the episode before, and from here to its end.
        episode: int64 (N,), 0 .. E - 1. success: bool (E,). task: int64 (E,).
        initial_state: int64 (E,); episodes with the same number began alike.
    """

    embedding: np.ndarray
    chunk: np.ndarray
    num_steps: np.ndarray
    following: np.ndarray
    elapsed: np.ndarray
    remaining: np.ndarray
    episode: np.ndarray
    success: np.ndarray
    task: np.ndarray
    initial_state: np.ndarray

    def __len__(self) -> int:
        return len(self.episode)

    def returns(self, discount: float) -> np.ndarray:
        """The discounted outcome from each decision on, float32 (N,): discount^(steps to the end), 0 for a failure."""
        return (self.success[self.episode] * discount ** self.remaining.astype(np.float64)).astype(np.float32)

    def check_outcomes_differ(self) -> None:
        """Refuse episodes that all ended alike.

        Raises:
            ValueError: they did.
        """
        if self.success.all() or not self.success.any():
            kind = "succeeded" if self.success.all() else "failed"
            raise ValueError(
                f"all {len(self.success)} logged episodes {kind}, or were recorded without outcomes: none can be told "
                "from another. Log episodes of both kinds (collect.keep=all), or set offline.method=cloning"
            )

    def with_shuffled_outcomes(self, seed: int) -> Transitions:
        """The same with outcomes dealt anew among the episodes of each task: a negative control."""
        success, rng = self.success.copy(), np.random.default_rng(seed)
        for task in np.unique(self.task):
            own = np.flatnonzero(self.task == task)
            success[own] = success[rng.permutation(own)]
        return replace(self, success=success)

    def folds(self, count: int, seed: int) -> np.ndarray:
        """The fold of each decision, int64 (N,), 0 .. count - 1; an initial state lies in one fold.

        Raises:
            ValueError: fewer initial states than folds.
        """
        states, place = np.unique(self.initial_state, return_inverse=True)
        if len(states) < count:
            raise ValueError(
                f"episodes of {len(states)} initial states; {count} folds (offline.critic.folds) need more"
            )
        return (np.random.default_rng(seed).permutation(len(states)) % count)[place][self.episode]


def logged_transitions(policy: Policy | None, data: BCDataset) -> Transitions:
    """The decisions of datasets, as the policy sees them: those frames that cloning learns from, in their order.

    Without a policy embeddings have no numbers: for what asks outcomes alone.

    Raises:
        ValueError: the policy has no embeddings.
    """
    parts = [_of_dataset(policy, part, data.chunk_size) for part in data.parts]
    first_row = np.cumsum([0, *(len(part) for part in parts)])
    first_episode = np.cumsum([0, *(len(part.success) for part in parts)])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("embedding", "chunk", "num_steps", "elapsed", "remaining", "success")
    }
    return Transitions(
        **columns,
        following=np.concatenate(
            [np.where(p.following < 0, -1, p.following + f) for p, f in zip(parts, first_row, strict=False)]
        ),
        episode=np.concatenate([p.episode + f for p, f in zip(parts, first_episode, strict=False)]),
        task=_numbered([d.instructions[t] for d in data.parts for t in d.task[d.starts]]),
        initial_state=_numbered([_place(d, i, name) for i, d in enumerate(data.parts) for name in d.initial_states]),
    )


def _place(data: EpisodeDataset, number: int, name: str) -> str:
    """An initial state's name: the environment's is one for all datasets, a recording's own is not."""
    return name if name.count("/") == 2 else f"{number}/{name}"


def _numbered(names: Sequence[str]) -> np.ndarray:
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _of_dataset(policy: Policy | None, data: EpisodeDataset, chunk_size: int) -> Transitions:
    """One dataset's; tasks and initial states are numbered by the caller."""
    rows = data.rows
    episode = np.searchsorted(data.starts, rows, side="right") - 1
    after = rows + chunk_size
    ends = data.ends[rows]
    place = np.searchsorted(rows, after)
    there = np.append(rows, -1)[np.minimum(place, len(rows))]
    embedding, chunk = [], []
    for first in range(0, len(rows), _BATCH):
        batch = data.batch(rows[first : first + _BATCH], chunk_size)
        seen = np.zeros((batch.size, 0)) if policy is None else policy.embed(batch.obs).float().cpu().numpy()
        embedding.append(seen)
        chunk.append(batch.actions)
    unused = np.zeros(len(data.starts), np.int64)
    return Transitions(
        embedding=np.concatenate(embedding).astype(np.float32),
        chunk=np.concatenate(chunk).astype(np.float32),
        num_steps=np.minimum(chunk_size, ends - rows),
        following=np.where((after < ends) & (there == after), place, -1),
        elapsed=rows - data.starts[episode],
        remaining=ends - rows,
        episode=episode,
        success=data.success.astype(bool),
        task=unused,
        initial_state=unused,
    )
