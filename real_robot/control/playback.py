"""Chunks played to their end, one after the other: what the simulators' evaluation does, and simple servers.

Inference runs inside the control tick, so the loop stands still meanwhile: for simulators that wait
(`vla-rl sim-robot --lockstep`), comparisons and fast policies. Robots use `execution.ChunkExecutor`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from real_robot.types import Command, RobotObservation

Infer = Callable[[RobotObservation], np.ndarray | None]


class SynchronousActions:
    """Asks for a chunk when the last one has been played, and plays all of it.

    Args:
        infer: the policy: one observation to actions, float32 (H, A), or None where it has none now.
        num_actions: how many actions of each chunk to play; 0 plays all.
    """

    def __init__(self, infer: Infer, num_actions: int = 0) -> None:
        self._infer, self._num_actions = infer, num_actions
        self._observation: RobotObservation | None = None
        self._chunk: list[np.ndarray] = []

    def submit(self, observation: RobotObservation, step: int) -> None:
        self._observation = observation

    def next_action(self, step: int) -> Command | None:
        if not self._chunk:
            if self._observation is None:
                return None
            answer = self._infer(self._observation)
            if answer is None:
                return None
            chunk = np.asarray(answer, np.float32)
            if chunk.ndim != 2 or not len(chunk):
                raise ValueError(f"the policy gave actions of shape {chunk.shape}, expected (H, A) with H of 1 or more")
            self._chunk = list(chunk[: self._num_actions or None])
            self._observation = None
        return Command(self._chunk.pop(0), "policy", time.monotonic())

    def reset(self) -> None:
        self._chunk, self._observation = [], None

    def close(self) -> None:
        """Nothing to release."""
