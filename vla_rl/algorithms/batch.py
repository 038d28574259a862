"""A rollout as flat decisions: which episodes count, which actions, with what advantage. Numpy only.

Shape legend: N decisions (chunks) of all episodes, K of one episode, H actions, A dimensions, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_rl.distributed.process_group import ProcessGroup
from vla_rl.types import ActionChunk, Episode, Observation


@dataclass
class Batch:
    """N decisions to learn from. Pixels stay in the episodes, once; `observations` gathers a minibatch's.

    Attributes:
        episodes: the episodes that the decisions come from.
        episode: int64 (N,), index into `episodes`. chunk: int64 (N,), which of its chunks.
        chunks: the N chunks drawn.
        valid: bool (N, H), actions that count.
        advantage: float32 (N, H), zero where not valid.
        old_log_prob: float32 (N, H, A), of the policy that drew the chunks.
        reference_log_prob: float32 (N, H, A), of the frozen reference; None without a KL term.
        old_value, returns: float32 (N,), the critic's estimate and target; None without a critic.
        metrics: what is worth logging about the rollout.
        filler: an episode of this process, for a forward pass that only keeps step with other processes.
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
    filler: Episode | None = None

    @property
    def size(self) -> int:
        """N."""
        return len(self.episode)

    @property
    def active(self) -> np.ndarray:
        """bool (N,): decisions with an advantage that is not exactly 0."""
        return (self.advantage != 0).any(1)

    def observations(self, rows: np.ndarray) -> Observation:
        """The observations of the decisions `rows`, in that order."""
        return gather_observations(self.episodes, self.episode[rows], self.chunk[rows])


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
        """Made by all processes together."""
        valid, own = world.all_gather_rows(batch.valid)
        rank, _ = world.all_gather_rows(np.full(batch.size, world.rank, np.int64))
        episode, _ = world.all_gather_rows(batch.episode * world.size + world.rank)
        return Pool(valid, world.all_gather_rows(batch.active)[0], episode, rank, own.start)

    @property
    def size(self) -> int:
        """N."""
        return len(self.rank)


def gather_observations(episodes: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray) -> Observation:
    """Observations by (episode, chunk); a chunk number of K means the episode's final observation.

    Args:
        episode, chunk: int (N,).
    """
    sources = [
        (episodes[e].final_obs, 0) if c == episodes[e].num_chunks else (episodes[e].obs, int(c))
        for e, c in zip(episode, chunk, strict=True)
    ]
    return Observation(
        images={name: np.stack([obs.images[name][i] for obs, i in sources]) for name in sources[0][0].images},
        state=np.stack([obs.state[i] for obs, i in sources]),
        instruction=[obs.instruction[i] for obs, i in sources],
    )


def valid_actions(episode: Episode, mask_after_success: bool = True) -> np.ndarray:
    """Which actions of an episode count in the loss, bool (K, H).

    With the mask: those executed, up to and with the one that first succeeded. Without it: all that
    were drawn, also the part of the last chunk that the episode's end cut off.
    """
    num_actions = episode.reward.shape[1]
    if not mask_after_success:
        return np.ones((episode.num_chunks, num_actions), bool)
    executed = np.arange(num_actions) < episode.num_steps[:, None]
    ended = np.cumsum(episode.terminated.reshape(-1)).reshape(executed.shape) - episode.terminated > 0
    return executed & ~ended


def index_decisions(episodes: Sequence[Episode]) -> tuple[np.ndarray, np.ndarray]:
    """(episode, chunk) numbers of every decision, int64 (N,) each."""
    lengths = [e.num_chunks for e in episodes]
    episode = np.repeat(np.arange(len(episodes)), lengths)
    chunk = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0, np.int64)
    return episode.astype(np.int64), chunk.astype(np.int64)


def usable_episodes(episodes: Sequence[Episode]) -> list[Episode]:
    """Episodes that were not lost.

    Raises:
        ValueError: none is left.
    """
    usable = [e for e in episodes if not e.lost]
    if not usable:
        raise ValueError(
            f"no episode to learn from: all {len(episodes)} of the rollout were lost. "
            "Look at the simulator's messages above (a worker that dies or hangs loses its episode)."
        )
    return usable


def has_spread(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """bool (E,): whether the rewards in each episode's group differ."""
    result = np.zeros(len(rewards), bool)
    for group in np.unique(groups):
        rows = groups == group
        result[rows] = np.ptp(rewards[rows]) > 0
    return result


def rollout_metrics(episodes: Sequence[Episode], usable: Sequence[Episode]) -> dict[str, float]:
    """Success, length and group statistics of a rollout, by name."""
    groups = np.array([e.group for e in usable])
    spread = has_spread(np.array([float(e.success) for e in usable]), groups)
    num_groups = len(np.unique(groups))
    return {
        "rollout/success_rate": float(np.mean([e.success for e in usable])),
        "rollout/reward": float(np.mean([e.total_reward for e in usable])),
        "rollout/length": float(np.mean([e.length for e in usable])),
        "rollout/num_episodes": float(len(usable)),
        "rollout/num_lost": float(len(episodes) - len(usable)),
        "rollout/informative_groups": len(np.unique(groups[spread])) / num_groups,
    }
