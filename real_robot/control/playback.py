"""Synchronous playback of action chunks, one after the other: as the simulators' evaluation does, and simple servers.

For simulators that wait (`vla-rl robot sim lockstep=true`), comparisons and fast policies; robots use
`execution.ChunkExecutor`. While a chunk is computed nothing is sent. With an `InferenceThread` the loop ticks on
meanwhile, so that a stop brakes at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import numpy as np

from real_robot.control.robot_loop import WAIT, Pacer
from real_robot.types import Command, RobotObservation

Infer = Callable[[RobotObservation], np.ndarray | None]
Awaited = Future[np.ndarray | None]


class SynchronousActions:
    """Asks for a chunk when the last one has been played, and plays all of it.

    Args:
        infer: the policy: one observation to actions, float32 (H, A), or None where it has none now; or to those in
            future (`InferenceThread`).
        num_actions: how many actions of each chunk to play; 0 plays all.
    """

    def __init__(self, infer: Callable[[RobotObservation], np.ndarray | Awaited | None], num_actions: int = 0) -> None:
        self._infer, self._num_actions = infer, num_actions
        self._observation: RobotObservation | None = None
        self._chunk: list[np.ndarray] = []
        self._awaited: Awaited | None = None
        self._was_told = False  # that the awaited chunk is there

    def submit(self, observation: RobotObservation, step: int) -> None:
        self._observation = observation

    def next_action(self, step: int) -> Command | None:
        if not self._chunk:
            if self._awaited is None:
                if self._observation is None:
                    return None
                answer = self._infer(self._observation)
                self._awaited, self._was_told = (answer if isinstance(answer, Future) else _done(answer)), False
            if not self._awaited.done():
                return WAIT
            answer, self._awaited = self._awaited.result(), None
            if answer is None:
                return None
            chunk = np.asarray(answer, np.float32)
            if chunk.ndim != 2 or not len(chunk):
                raise ValueError(f"the policy gave actions of shape {chunk.shape}, expected (H, A) with H of 1 or more")
            self._chunk = list(chunk[: self._num_actions or None])
            self._observation = None
        return Command(self._chunk.pop(0), "policy", time.monotonic())

    def wait(self, timeout: float) -> bool:
        """Wait for the chunk that is computed, at most `timeout` seconds. Returns False at once where none is."""
        if self._awaited is None or self._was_told:
            return False
        wait([self._awaited], timeout)
        self._was_told = self._awaited.done()
        return True

    def reset(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
        self._chunk, self._observation, self._awaited = [], None, None

    def close(self) -> None:
        self.reset()


def _done(chunk: np.ndarray | None) -> Awaited:
    done: Awaited = Future()
    done.set_result(chunk)
    return done


class InferenceThread:
    """Computes one chunk after the other in a thread of its own, which ends with the program."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        self._asked: queue.SimpleQueue[tuple[RobotObservation, Awaited]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="inference", daemon=True).start()

    def __call__(self, observation: RobotObservation) -> Awaited:
        awaited: Awaited = Future()
        self._asked.put((observation, awaited))
        return awaited

    def _run(self) -> None:
        while True:
            observation, awaited = self._asked.get()
            if not awaited.set_running_or_notify_cancel():
                continue
            try:
                awaited.set_result(self._infer(observation))
            except Exception as error:  # raised in the loop, by `result`
                awaited.set_exception(error)


class SynchronousPacer:
    """Ticks as another pacer does, and at the control rate while a chunk is awaited."""

    def __init__(self, pacer: Pacer, actions: SynchronousActions, rate: float) -> None:
        self._pacer, self._actions, self._period = pacer, actions, 1 / rate

    def wait(self, active: bool) -> float:
        return 0.0 if active and self._actions.wait(self._period) else self._pacer.wait(active)
