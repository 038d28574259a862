"""Training batch: a rollout as flat decisions with validity masks and advantages. Numpy only.

Shape legend: N decisions (chunks) of all episodes, K of one episode, H actions, A dimensions, E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.types import MAX_INPUT_BYTES, ActionChunk, Episode, Observation

if TYPE_CHECKING:
    from vla_rl.interfaces import Policy

NOTHING_TO_COMPARE = (
    "algo.kind {!r} compares episodes from the same initial state, but each of the {} groups has one. Set the "
    "rollout's group size to at least 2, or use ppo or reinforce_pp."
)
# A ratio of 5e8 at most: its square and its sum over a minibatch stay finite in float32.
MAX_LOG_RATIO = 20.0
# (episodes, episode, chunk, chunks) -> log_prob float32 (N, H, A), and value float32 (N,) or None, without gradient.
Evaluate = Callable[[Sequence[Episode], np.ndarray, np.ndarray, ActionChunk], tuple[np.ndarray, np.ndarray | None]]


@dataclass
class Batch:
    """N decisions to learn from. Pixels stay in the episodes; `observations` gathers a minibatch's.

    Attributes:
        episodes: this process's of the rollout, none lost; some may have no decision in the batch.
        episode: int64 (N,), index into `episodes`. chunk: int64 (N,), which of its chunks.
        chunks: the N chunks drawn.
        valid: bool (N, H), actions that count.
        advantage: float32 (N, H), zero where not valid.
        old_log_prob: float32 (N, H, A), of the policy before the update, to which ratios are taken.
        reference_log_prob: float32 (N, H, A), of the frozen reference; None without a KL term.
        old_value, returns: float32 (N,), the critic's estimate and target; None without a critic.
        metrics: what is worth logging about the rollout.
        obs: the N observations, where decisions came from other processes without their episodes (see `sharding.py`);
            None: the episodes have them.
        behavior_log_prob: float32 (N, H, A), of the policies that drew the chunks, and lag: int64 (N,), how many
            updates ago that was; None where all were drawn by the policy before the update.
    """

    episodes: list[Episode]
    episode: np.ndarray
    chunk: np.ndarray
    chunks: ActionChunk
    valid: np.ndarray
    advantage: np.ndarray
    old_log_prob: np.ndarray
    reference_log_prob: np.ndarray | None = None
    old_value: np.ndarray | None = None
    returns: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    obs: Observation | None = None
    behavior_log_prob: np.ndarray | None = None
    lag: np.ndarray | None = None

    @property
    def size(self) -> int:
        """N."""
        return len(self.episode)

    @property
    def active(self) -> np.ndarray:
        """bool (N,): decisions with an advantage that is not exactly 0."""
        return (self.advantage != 0).any(1)

    def observations(self, rows: np.ndarray) -> Observation:
        """Return the observations of the decisions `rows`, in that order; prepared, where all of them were kept so."""
        own = self.obs
        return own.select(rows) if own else gather_observations(self.episodes, self.episode[rows], self.chunk[rows])

    def select(self, rows: np.ndarray) -> Batch:
        """Return a batch of the decisions `rows`, int (B,), in that order; episodes and metrics are the same ones."""
        columns = {f.name: value[rows] for f in fields(self) if isinstance(value := getattr(self, f.name), np.ndarray)}
        return replace(self, **columns, chunks=self.chunks.select(rows), obs=self.obs and self.obs.select(rows))


@dataclass(frozen=True)
class Pool:
    """The decisions of all processes, those of process 0 first: what minibatches and their weights are made from.

    Attributes:
        valid: bool (N, H). active: bool (N,), as in `Batch`.
        episode: int64 (N,), no number in two processes. rank: int64 (N,), whose decision it is.
        first: where those of this process begin.
    """

    valid: np.ndarray
    active: np.ndarray
    episode: np.ndarray
    rank: np.ndarray
    first: int

    @staticmethod
    def of(batch: Batch, world: ProcessGroup) -> Pool:
        """Gather all processes' decisions; called by all together."""
        valid, own = world.all_gather_rows(batch.valid)
        rank, _ = world.all_gather_rows(np.full(batch.size, world.rank, np.int64))
        episode, _ = world.all_gather_rows(batch.episode * world.size + world.rank)
        return Pool(valid, world.all_gather_rows(batch.active)[0], episode, rank, own.start)

    @property
    def size(self) -> int:
        """N."""
        return len(self.rank)


def decisions(episodes: Sequence[Episode]) -> tuple[np.ndarray, np.ndarray, ActionChunk, np.ndarray]:
    """Return (episode, chunk, chunks, valid) of every decision of at least one episode, as in `Batch`."""
    lengths = [e.num_chunks for e in episodes]
    episode, chunk = np.repeat(np.arange(len(episodes)), lengths), np.concatenate([np.arange(n) for n in lengths])
    valid = np.concatenate([valid_actions(e) for e in episodes])
    return episode, chunk, ActionChunk.concatenate([e.chunks for e in episodes]), valid


def gather_observations(episodes: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray) -> Observation:
    """Return observations by (episode, chunk), int (N,) each; K: the final one. Prepared, where all are kept so."""
    places = [(episodes[e], int(c)) for e, c in zip(episode, chunk, strict=True)]
    rows = [(e.inputs, c) for e, c in places if e.inputs is not None and c < e.num_chunks]
    if len(rows) < len(places):
        rows = [(e.obs, c) if c < e.num_chunks else (e.final_obs, 0) for e, c in places]
    return Observation.concatenate([obs.row(i) for obs, i in rows])


def with_inputs(policy: Policy, episodes: list[Episode]) -> list[Episode]:
    """Return the episodes with what the policy prepares of them; as they are where some have it, or it is too much."""
    if any(e.inputs is not None for e in episodes) or sum(e.obs.nbytes for e in episodes) > MAX_INPUT_BYTES:
        return episodes
    return [replace(e, inputs=policy.prepare(e.obs)) for e in episodes]


def valid_actions(episode: Episode) -> np.ndarray:
    """Return which actions count in the loss, bool (K, H): those executed, up to and with the first that succeeded."""
    num_actions = episode.reward.shape[1]
    executed = np.arange(num_actions) < episode.num_steps[:, None]
    ended = np.cumsum(episode.terminated.reshape(-1)).reshape(executed.shape) - episode.terminated > 0
    return executed & ~ended


def rollout_log_prob(chunks: ActionChunk) -> np.ndarray:
    """Return the log-probabilities that the rollout recorded, float32 (N, H, A).

    Raises:
        ValueError: it recorded none.
    """
    if chunks.log_prob is None:
        raise ValueError(
            "the rollout carries no log-probabilities (greedy or scripted actions?). "
            "RL needs actions that the policy sampled, at a temperature above 0."
        )
    return chunks.log_prob


def log_prob_gap(
    recorded: np.ndarray | None, computed: np.ndarray, counted: np.ndarray, world: ProcessGroup
) -> dict[str, float]:
    """Measure how far the rollout's log-probabilities are from the trainer's: mean absolute difference per token."""
    gap = np.zeros(0) if recorded is None else np.abs(recorded[counted] - computed[counted])
    parts = world.gather([float(gap.sum()), gap.size])
    total, num = (sum(column) for column in zip(*parts, strict=True))
    return {"rollout/log_prob_gap": total / num} if num else {}


def shuffle_advantages(advantages: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Deal the same advantages to other rows, over all groups and tasks: the negative control.

    A gain that this control shares did not come from the reward.

    Args:
        advantages: (E, ...), permuted along the first axis.
    """
    return advantages[generator.permutation(len(advantages))]


def rows_by_group(groups: np.ndarray) -> list[np.ndarray]:
    """Return each group's rows, in order of the groups' numbers; those of an array int (E,)."""
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def all_same(values: np.ndarray) -> bool:
    """Return whether all values (at least one) are equal, so that their advantages are exactly 0."""
    return bool((values == values[0]).all())


def has_spread(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return whether the rewards in each episode's group differ, bool (E,)."""
    return np.array([not all_same(rewards[groups == group]) for group in groups], bool)
