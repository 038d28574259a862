"""Earlier rollouts that GRPO and its like learn from once more, beside the newest (`train.reuse`).

Their chunks carry the version that drew them, so that the decoupled objective weighs them (algorithms/stale.py). A
checkpoint holds the rollouts, pixels and all: a resumed run learns from the same episodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from vla_rl.rollout.success import usable_episodes
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

if TYPE_CHECKING:
    from vla_rl.distributed.process_group import ProcessGroup
    from vla_rl.training.train import TrainConfig

_ARRAYS = ("reward", "terminated", "truncated", "num_steps")
_PREFIX = "earlier."


class EarlierRollouts:
    """The last rollouts, each of whole groups.

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
