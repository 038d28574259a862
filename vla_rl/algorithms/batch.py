"""Training batch: a rollout as flat decisions with masks and advantages, sharded over processes. No torch.

Shape legend: N decisions (chunks) of all episodes, K of one episode, H actions, A dimensions, E episodes.

Sharding of a minibatch over processes, in even parts: who holds more than its part sends the rest to others.

Episodes differ in length, and groups that teach nothing fall out, so that processes hold unequal parts of a minibatch;
all would wait for the largest. Everyone knows the pool, so all work out the same shards, and only decisions travel,
with what the policy prepared of their pixels. Minibatches, weights and sums are those of one process: no result
depends on who computed what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load, save

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.interfaces import Policy
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
        obs: the N observations, where decisions came from other processes without their episodes (see `shard`);
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
    executed = np.arange(episode.reward.shape[1]) < episode.num_steps[:, None]
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


def mixed_groups(rewards: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group whose rewards differ; the others' advantages are exactly 0. Both are (E,)."""
    return [rows for rows in rows_by_group(groups) if (rewards[rows] != rewards[rows[0]]).any()]


def has_spread(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return whether the rewards in each episode's group differ, bool (E,)."""
    return np.isin(groups, [groups[rows[0]] for rows in mixed_groups(rewards, groups)])


Part = tuple[dict[str, np.ndarray], Observation]  # A batch's arrays by name, with a row for each decision.


def shard(
    policy: Policy, batch: Batch, pool: Pool, rows: np.ndarray, used: np.ndarray, world: ProcessGroup
) -> tuple[np.ndarray, Batch, np.ndarray]:
    """Return what this process computes of a minibatch; called by all together.

    Args:
        policy: prepares observations. batch: this process's decisions. pool: everyone's.
        rows: int (B,), the minibatch's decisions in the pool. used: int (U,), which of these are computed at all.

    Returns:
        Which of the minibatch this process computes, int (M,) of 0 .. B - 1; a batch that holds them; and where in it
        they are, int (M,). M differs by one at most between processes.
    """
    owner = pool.rank[rows[used]]
    worker = even_workers(owner, world.size)
    mine = owner == world.rank
    if (worker == owner).all():
        return used[mine], batch, rows[used[mine]] - pool.first
    kept = mine & (worker == world.rank)
    sent = [rows[used[mine & (worker == rank) & ~kept]] - pool.first for rank in range(world.size)]
    came = world.exchange([_packed(*_taken(policy, batch, own)) if len(own) else b"" for own in sent])
    parts = [_taken(policy, batch, rows[used[kept]] - pool.first)] if kept.any() else []
    parts += [_unpacked(parcel) for parcel in came if parcel]
    theirs = [used[(worker == world.rank) & (owner == rank) & ~kept] for rank in range(world.size)]
    ours = np.concatenate([used[kept], *theirs])
    return ours, _joined(batch, parts) if parts else batch, np.arange(len(ours))


def even_workers(owner: np.ndarray, size: int) -> np.ndarray:
    """Return which process computes each decision, int (U,): even parts, by as few decisions moved as that takes.

    Args:
        owner: int (U,), which process holds each. size: how many processes there are.
    """
    counts = np.bincount(owner, minlength=size)
    each, more = divmod(len(owner), size)
    due = np.full(size, each)
    due[np.argsort(-counts, kind="stable")[:more]] += 1
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), np.int64)  # Of each among its owner's.
    place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    worker = owner.copy()
    worker[place >= due[owner]] = np.repeat(np.arange(size), np.maximum(due - counts, 0))
    return worker


# --- decisions that travel ---------------------------------------------------------------------


def _taken(policy: Policy, batch: Batch, rows: np.ndarray) -> Part:
    return {name: array[rows] for name, array in _columns(batch).items()}, policy.prepare(batch.observations(rows))


def _columns(batch: Batch) -> dict[str, np.ndarray]:
    """All that a batch has of each decision but the observation; an algorithm's own fields are among it."""
    columns: dict[str, np.ndarray] = {}
    for name, value in ((each.name, getattr(batch, each.name)) for each in fields(batch)):
        if isinstance(value, np.ndarray):
            columns[name] = value
        elif isinstance(value, ActionChunk):
            parts = {f"{name}.{part.name}": getattr(value, part.name) for part in fields(value)}
            columns |= {key: array for key, array in parts.items() if array is not None}
    return columns


def _packed(columns: dict[str, np.ndarray], obs: Observation) -> bytes:
    """A part as a safetensors file."""
    arrays = {f"row.{name}": array for name, array in columns.items()}
    arrays |= {f"image.{name}": image for name, image in obs.images.items()}
    text = json.dumps([obs.instruction, obs.is_prepared])
    arrays |= {"state": obs.state, "rest": np.frombuffer(text.encode(), np.uint8)}
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _unpacked(parcel: bytes) -> Part:
    arrays = load(parcel)

    def named(kind: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}

    instruction, is_prepared = json.loads(arrays["rest"].tobytes())
    return named("row."), Observation(named("image."), arrays["state"], instruction, is_prepared)


def _joined(batch: Batch, parts: Sequence[Part]) -> Batch:
    """A batch like this one with the decisions of parts, at least one, in order: observations in place of episodes."""
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
    values: dict[str, object] = {}
    for name in (each.name for each in fields(batch)):
        chunk = {key.removeprefix(f"{name}."): array for key, array in columns.items() if key.startswith(f"{name}.")}
        values |= {name: columns[name]} if name in columns else {name: ActionChunk(**chunk)} if chunk else {}
    return replace(batch, episodes=[], obs=Observation.concatenate([obs for _, obs in parts]), **values)
