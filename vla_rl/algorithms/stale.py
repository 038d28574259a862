"""Stale chunks, drawn by an earlier policy: reuse of earlier rollouts, and the decoupled objective.

A chunk's lag is the number of updates between the policy that drew it, the behavior policy, and the one before this
update, the proximal policy. `losses.policy_loss` clips around the second and weighs by second over first (AReaL, arXiv
2505.24298). Where no chunk lags, nothing here changes a number.

Shape legend: N decisions (chunks), H actions, A dimensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from vla_rl.algorithms.batch import Batch, log_prob_gap, rollout_log_prob
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.rollout.runner import usable_episodes
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

if TYPE_CHECKING:
    from vla_rl.algorithms.options import AlgoOptions
    from vla_rl.training.config import TrainConfig

_ARRAYS = ("reward", "terminated", "truncated", "num_steps")
_PREFIX = "earlier."


def lags(chunks: ActionChunk, version: int) -> np.ndarray:
    """Return how many updates ago each chunk was drawn, int64 (N,); 0 where the chunks carry no version.

    Args:
        version: of the policy as it is now.

    Raises:
        ValueError: a chunk of a later version.
    """
    if chunks.version is None:
        return np.zeros(len(chunks.actions), np.int64)
    lag = version - np.asarray(chunks.version, np.int64)
    if len(lag) and lag.min() < 0:
        raise ValueError(
            f"episodes hold chunks of version {int(np.max(chunks.version))}, but the learner has made {version} "
            "updates: they were drawn by a policy of its future. Roll out with the policy of the resumed checkpoint."
        )
    return lag


def has_stale(episodes: Sequence[Episode], version: int, config: AlgoOptions, world: ProcessGroup) -> bool:
    """Whether any process's episodes hold a chunk that an earlier policy drew; called by all together.

    Raises:
        ValueError: they do, and the algorithm cannot learn from it; or a chunk of a later version.
    """
    found = any(world.gather(any(bool(lags(e.chunks, version).any()) for e in episodes)))
    if found and not config.takes_stale_chunks:
        raise ValueError(
            f"algo.kind {config.kind!r} learns only from chunks that the policy drew as it is now, and these episodes "
            "hold older ones. Roll out with a staleness of 0, or use grpo or ppo."
        )
    return found


def decouple(batch: Batch, version: int, config: AlgoOptions, world: ProcessGroup) -> Batch:
    """Give a batch the behavior policies' log-probabilities, and lags.

    Those of chunks that do not lag stay as they are, and are their own behavior's. Called by all processes
    together.

    Raises:
        ValueError: the rollout recorded no log-probabilities.
    """
    batch.lag = lags(batch.chunks, version)
    is_stale, recorded = batch.lag > 0, rollout_log_prob(batch.chunks)
    batch.behavior_log_prob = np.where(is_stale[:, None, None], recorded, batch.old_log_prob)
    batch.metrics.pop("rollout/log_prob_gap", None)  # Of stale chunks it would be how far the policy has moved.
    computed = batch.valid & ~is_stale[:, None]
    if config.skips_zero_advantage:
        computed &= batch.active[:, None]
    batch.metrics |= log_prob_gap(batch.chunks.log_prob, batch.old_log_prob, computed, world)
    everyones, _ = world.all_gather_rows(batch.lag)
    if len(everyones):
        batch.metrics |= {
            "stale/share": float((everyones > 0).mean()),
            "stale/lag_mean": float(everyones.mean()),
            "stale/lag_max": float(everyones.max()),
        }
    return batch


# --- earlier rollouts --------------------------------------------------------------------------


class EarlierRollouts:
    """The last rollouts, each of whole groups, from which GRPO and its like learn once more (`train.reuse`).

    Their chunks carry the version that drew them. A checkpoint holds the rollouts, pixels and all: a resumed run learns
    from the same episodes.

    Args:
        keep: how many.
        groups: most groups of one rollout; earlier rollouts' are numbered after it.
    """

    def __init__(self, keep: int, groups: int) -> None:
        self._rollouts: deque[list[Episode]] = deque(maxlen=keep)
        self._groups = groups

    @classmethod
    def of(cls, config: TrainConfig, world: ProcessGroup) -> Self:
        """Return those of a run with `train.reuse`.

        Raises:
            ValueError: several processes train together.
        """
        if world.size > 1:
            raise ValueError(
                f"train.reuse: got {config.reuse} with {world.size} processes, and checkpoints hold one process's "
                "earlier rollouts. Set it to 0, or train in one process."
            )
        return cls(config.reuse, config.groups + config.resample_budget)

    def beside(self, episodes: Sequence[Episode], version: int) -> list[Episode]:
        """Return the newest rollout's episodes and then the earlier ones', newest first; keep the newest for later.

        Args:
            version: updates that the policy had seen which drew the newest, where its chunks do not say themselves.

        Raises:
            ValueError: all of the newest rollout were lost: nothing of it is left to learn from, or to report.
        """
        newest = [_stamped(episode, version) for episode in episodes]
        usable = usable_episodes(newest)
        together = list(newest)
        for age, rollout in enumerate(reversed(self._rollouts), 1):
            together += [replace(episode, group=episode.group + age * self._groups) for episode in rollout]
        self._rollouts.append([replace(e, frames=None, states=None, info={}) for e in usable])
        return together

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps of them as tensors: each field of all episodes in a row."""
        episodes = [episode for rollout in self._rollouts for episode in rollout]
        if not episodes:
            return {}
        arrays = {name: np.concatenate([getattr(e, name) for e in episodes]) for name in _ARRAYS}
        chunks = ActionChunk.concatenate([e.chunks for e in episodes])
        arrays |= {f"chunks.{f.name}": value for f in fields(chunks) if (value := getattr(chunks, f.name)) is not None}
        for name in ("obs", "final_obs"):
            obs = Observation.concatenate([getattr(e, name) for e in episodes])
            arrays |= {f"{name}.image.{camera}": image for camera, image in obs.images.items()}
            arrays[f"{name}.state"] = obs.state
        return {_PREFIX + name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def state(self) -> list[list[dict[str, Any]]]:
        """Return the rest of what a checkpoint keeps, JSON-able: rollouts of episodes, oldest first."""
        return [[_facts(episode) for episode in rollout] for rollout in self._rollouts]

    def load(self, tensors: Mapping[str, torch.Tensor], state: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Undo `tensors` and `state`."""
        arrays = {n.removeprefix(_PREFIX): t.numpy() for n, t in tensors.items() if n.startswith(_PREFIX)}
        self._rollouts.clear()
        chunk = episode = 0
        for rollout in state:
            loaded = list[Episode]()
            for facts in rollout:
                loaded.append(_episode(arrays, facts, slice(chunk, chunk + facts["num_chunks"]), episode))
                chunk, episode = chunk + facts["num_chunks"], episode + 1
            self._rollouts.append(loaded)


def _stamped(episode: Episode, version: int) -> Episode:
    if episode.chunks.version is not None:
        return episode
    return replace(episode, chunks=replace(episode.chunks, version=np.full(episode.num_chunks, version, np.int64)))


def _facts(episode: Episode) -> dict[str, Any]:
    spec = episode.spec
    return {
        "num_chunks": episode.num_chunks,
        "group": episode.group,
        "success": bool(episode.success),
        "spec": {"task": spec.task, "split": spec.split, "index": spec.index, "perturbation": spec.perturbation},
        "instruction": episode.obs.instruction[0],
    }


def _episode(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], rows: slice, number: int) -> Episode:
    def observation(name: str, own: slice) -> Observation:
        images = {n.removeprefix(f"{name}.image."): a[own] for n, a in arrays.items() if n.startswith(f"{name}.image.")}
        return Observation(images, arrays[f"{name}.state"][own], [facts["instruction"]] * (own.stop - own.start))

    chunks = {n.removeprefix("chunks."): a[rows] for n, a in arrays.items() if n.startswith("chunks.")}
    return Episode(
        spec=EpisodeSpec(**facts["spec"]),
        obs=observation("obs", rows),
        chunks=ActionChunk(**chunks),
        success=facts["success"],
        final_obs=observation("final_obs", slice(number, number + 1)),
        group=facts["group"],
        reward=arrays["reward"][rows],
        terminated=arrays["terminated"][rows],
        truncated=arrays["truncated"][rows],
        num_steps=arrays["num_steps"][rows],
    )
