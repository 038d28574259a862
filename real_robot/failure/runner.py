"""Runs a detector beside the control loop: the loop hands over the latest embedding and never waits."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from real_robot.failure.detector import FailureDetector, Score


class _Task:
    """Work for the thread: chunk `number`'s embedding, or (embedding None) to forget that chunk and all after it."""

    def __init__(self, episode: int, instruction: str, number: int, embedding: np.ndarray | None) -> None:
        self.episode, self.instruction, self.number, self.embedding = episode, instruction, number, embedding
        self.asked = time.monotonic()


class DetectorThread:
    """One thread, one place in its queue: a newer embedding takes the place of one that was not yet looked at.

    A detector that raises, and an embedding with NaN, are alarms: `latest` says so until the next `reset`.

    Args:
        detector: used by the thread alone from now on.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._changed = threading.Condition()
        self._waiting: _Task | None = None
        self._waits_since = 0.0  # when the place in the queue was taken, by whatever stands there now
        self._running: _Task | None = None
        self._closed = False
        self._episode, self._number, self._instruction = 0, 0, ""
        self._latest: Score | None = None
        self._thread = threading.Thread(target=self._run, name="failure-detector", daemon=True)
        self._thread.start()

    def reset(self, instruction: str) -> None:
        """A new episode begins; scores of the old one are discarded. Does not wait."""
        with self._changed:
            self._episode, self._number, self._instruction = self._episode + 1, 0, instruction
            self._waiting, self._latest = None, None

    def submit(self, embedding: np.ndarray, number: int | None = None) -> int:
        """Hand over a chunk's embedding, float (D,); returns its number in the episode. Does not wait.

        Args:
            number: None: the next. Those left out, and those that a newer one replaced, it stands for too.
        """
        copied = np.array(embedding, np.float32)
        with self._changed:
            number = self._number if number is None else number
            self._put(number, copied)
            self._number = number + 1
            return number

    def rewind(self, num_kept: int) -> None:
        """Forget all chunks of the episode but the first `num_kept`; `latest` will be the last one's. Does not wait."""
        with self._changed:
            self._put(num_kept, None)
            self._number = num_kept

    def latest(self) -> Score | None:
        """The newest score of the current episode; None before the first."""
        with self._changed:
            return self._latest

    def seconds_behind(self) -> float:
        """How long the oldest work of this episode has waited; 0 where there is none. Large: the detector hangs."""
        with self._changed:
            running, waiting = self._running, self._waiting
            since = [self._waits_since] if waiting is not None else []
            since += [running.asked] if running is not None and running.episode == self._episode else []
            return time.monotonic() - min(since) if since else 0.0

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is left to do; False after `timeout` seconds. Not for a control loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._running is None, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, number: int, embedding: np.ndarray | None) -> None:
        if self._closed:
            raise RuntimeError("the detector's thread was closed")
        task = _Task(self._episode, self._instruction, number, embedding)
        self._waits_since = task.asked if self._waiting is None else self._waits_since
        self._waiting = task
        self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        from real_robot.failure.detector import Score

        episode, broken = -1, ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed:
                    return
                task, self._waiting = self._waiting, None
                self._running = task
            assert task is not None, "woken with work"
            score = None
            try:
                if task.episode != episode:
                    self._detector.reset(task.instruction)
                    episode, broken = task.episode, ""
                if not broken:
                    score = self._score(task)
                    broken = score.reason if score is not None else ""
            except Exception as error:  # The thread's edge: a person must hear of it, and the robot must not go on.
                broken = f"{type(error).__name__}: {error}"
            if broken:
                score = Score(float("nan"), float("nan"), True, task.number, broken)
            with self._changed:
                if task.episode == self._episode:
                    self._latest = score
                self._running = None
                self._changed.notify_all()

    def _score(self, task: _Task) -> Score | None:
        if (surplus := self._detector.num_chunks - task.number) > 0:
            score = self._detector.rewind(surplus)
            if task.embedding is None:
                return score
        if task.embedding is None:
            return self.latest()
        return self._detector.update(task.embedding, number=task.number)
