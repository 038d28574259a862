"""What the benchmarks run: environments whose control steps are counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vla_rl.interfaces import VecEnv
from vla_rl.types import EpisodeSpec


class Runner(Protocol):
    """Something whose control steps are counted."""

    def run(self, seconds: float) -> tuple[int, float]:
        """Step for about this long. Returns control steps executed, of all environments, and seconds spent stepping."""
        ...


class OursRunner:
    """One of our environments, `chunk` steps per call, the observation rendered once per call."""

    def __init__(self, env: VecEnv, chunk: int) -> None:
        self.env, self.chunk = env, chunk
        self._next_index = 0

    def _reset(self, env_ids: Sequence[int]) -> None:
        task = next(iter(self.env.spec.tasks))
        specs = [EpisodeSpec(task, "train", self._next_index + k) for k in range(len(env_ids))]
        self._next_index += len(env_ids)
        self.env.reset(specs, env_ids)

    def run(self, seconds: float) -> tuple[int, float]:
        """See `Runner`."""
        self._reset(range(self.env.num_envs))
        rng = np.random.default_rng(0)
        steps, spent = 0, 0.0
        while spent < seconds:
            actions = draw_actions(rng, self.env.num_envs, self.chunk)
            start = time.perf_counter()
            result = self.env.step(actions)
            spent += time.perf_counter() - start
            steps += int(result.num_steps.sum())
            if result.done.any():
                self._reset(np.flatnonzero(result.done).tolist())
        return steps, spent


def draw_actions(rng: np.random.Generator, num_envs: int, length: int) -> np.ndarray:
    """float32 (num_envs, length, 7): gentle random motions with an open gripper, which move the arm and end nothing."""
    actions = rng.uniform(-0.3, 0.3, (num_envs, length, 7)).astype(np.float32)
    actions[..., 6] = -1.0
    return actions
