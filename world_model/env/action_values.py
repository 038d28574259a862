"""Action values of a world model: it watches a real episode up to a decision, and imagines what chunks do there.

All chunks of a decision are imagined with the same noise, so that what differs between them is what they do. The noise
and all else is settled before it is known which of them was executed: the values are one function of the action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from vla_rl.algorithms.base import ActionValues, ActionValuesConfig
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import derived_seed
from vla_rl.types import Episode
from world_model.env.planning import check_fits, imagine_ahead, views
from world_model.model.world_model import Memory, WorldModel, load_world_model
from world_model.noise import NoiseStream
from world_model.types import Frames

EPISODES_AT_ONCE = 32  # Watched together, which bounds the memory.

CHUNKS_AT_ONCE = 256  # Imagined, about, which bounds the memory.


class WorldModelValuesConfig(ActionValuesConfig):
    """An action chunk is worth the probability of success that a world model gives, having imagined what it does."""

    kind: Literal["world_model"] = "world_model"
    path: str | Path = Field(
        description="A world model's folder, or pretrained:NAME, fitted on none of the episodes that it values."
    )

    def build(self, policy: Policy, device: str = "cpu") -> ActionValues:
        """What values the policy's actions.

        Raises:
            ValueError: no such world model, or one of other cameras or another chunk length than the policy's.
        """
        return WorldModelValues(policy, self, device)


class WorldModelValues:
    """The value head's probability of success after imagined chunks; see `vla_rl.algorithms.base`.

    Raises:
        ValueError: the world model has no value, lacks a camera of the policy's, or its frames are not the chunks.
    """

    def __init__(self, policy: Policy, config: WorldModelValuesConfig, device: str = "cpu") -> None:
        self.policy, self.config = policy, config
        self.world_model: WorldModel = load_world_model(config.path, device).compute_in("auto")
        self.world_model.check_value()
        check_fits(self.world_model, policy, "algo.values.path")

    def of(
        self, episodes: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray, actions: np.ndarray
    ) -> np.ndarray:
        """Return float64 (N, K), in 0 .. 1."""
        found = np.zeros(actions.shape[:2])
        numbers = np.unique(episode)
        for start in range(0, len(numbers), EPISODES_AT_ONCE):
            some = numbers[start : start + EPISODES_AT_ONCE]
            rows = np.flatnonzero(np.isin(episode, some))
            place = np.searchsorted(some, episode[rows])
            found[rows] = self._of_some([episodes[i] for i in some], place, chunk[rows], actions[rows])
        return found

    @torch.no_grad()
    def _of_some(
        self, episodes: Sequence[Episode], place: np.ndarray, chunk: np.ndarray, actions: np.ndarray
    ) -> np.ndarray:
        """Watch episodes together and stop at each decision to imagine. `place`: int64 (N,), of `episodes`."""
        found = np.zeros(actions.shape[:2])
        seen = [self._seen(e) for e in episodes]
        seeds = [derived_seed(0, e.spec.index) for e in episodes]
        first = Frames.joined([frames.at(slice(0, 1)) for frames in seen])
        memory = self.world_model.begin(first, [e.obs.instruction[0] for e in episodes], seeds)
        for number in range(int(chunk.max()) + 1):
            if number > 0:
                memory = self._watch(memory, episodes, seen, number)
            rows = np.flatnonzero(chunk == number)
            size = max(1, CHUNKS_AT_ONCE // actions.shape[1])
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                found[part] = self._imagined(memory, episodes, place[part], number, actions[part])
        return found

    def _seen(self, episode: Episode) -> Frames:
        """What was seen at the decisions, 1 x T frames."""
        images = views(self.world_model, episode.obs, "algo.values.path")
        return self.world_model.encode(images[None], episode.obs.state[None])

    def _watch(self, memory: Memory, episodes: Sequence[Episode], seen: Sequence[Frames], number: int) -> Memory:
        """Remember what was seen at decision `number`, and the chunk that led there, where an episode came so far."""
        rows = [i for i, e in enumerate(episodes) if e.num_chunks > number]
        frames = Frames.joined([seen[i].at(slice(number, number + 1)) for i in rows])
        actions = np.stack([episodes[i].chunks.actions[number - 1] for i in rows])
        steps = np.array([episodes[i].num_steps[number - 1] for i in rows])
        later = self.world_model.extend(memory.select(rows), frames, self.world_model.actions(actions, steps))
        return memory.put(rows, later)

    def _imagined(
        self, memory: Memory, episodes: Sequence[Episode], place: np.ndarray, number: int, actions: np.ndarray
    ) -> np.ndarray:
        """Return the values of K chunks at decision `number` of B episodes, float64 (B, K); actions: (B, K, H, A)."""
        count = actions.shape[1]
        some = [episodes[i] for i in place]
        noise = [derived_seed(0, e.spec.index, number) for e in some for _ in range(count)]
        start = replace(memory.select(place.repeat(count).tolist()), noise=NoiseStream(noise, self.world_model.device))
        flat = actions.reshape(-1, *actions.shape[2:])
        *_, (before, frames) = imagine_ahead(self.world_model, self.policy, start, flat, 1)
        horizon = self.world_model.metadata.horizon
        ends = np.array([horizon.get(e.spec.task, max(horizon.values())) for e in some])
        began = np.array([0 if e.spec.keyframe is None else e.spec.keyframe.step for e in some])
        steps = began + [int(e.num_steps[:number].sum()) for e in some] + actions.shape[2]
        left = np.maximum(ends - steps, 0).repeat(count)[:, None]
        last = frames.at(slice(-1, None))
        if frames.states.shape[1] > 1:
            before = before.seeing(frames.at(slice(0, -1)))
        return self.world_model.value(before, last, left)[:, 0].double().cpu().numpy().reshape(-1, count)
