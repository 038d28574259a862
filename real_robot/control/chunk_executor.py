"""Asynchronous action-chunk execution: the control tick never waits for the policy, nor jumps.

A thread calls the policy with the newest observation. Chunks are aligned by control step: action i of a chunk whose
observation was made before step s belongs to step s + i, so what has passed while it was computed is skipped. Where
the source of actions changes, the difference fades away over some steps. A policy that is late, hangs or fails gives
no command, and the supervisor holds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from real_robot.contract.sections import ExecutionConfig, RealTimeChunking
from real_robot.types import Command, RobotObservation

RETRY_AFTER = 0.2  # seconds to wait after a failed inference


class Infer(Protocol):
    """A policy: one observation to a chunk, float32 (H, A). May block and raise.

    With `real_time_chunking` it is also given, while a chunk is played: `prefix` float32 (P, A), the actions that are
    played from this observation on; `num_frozen`, how many of them will be over before the new chunk can arrive; and
    `guidance`, the options that the config gives. See `vla_rl.types.ActionPrefix`.
    """

    def __call__(self, observation: RobotObservation, /) -> np.ndarray: ...


@dataclass(frozen=True)
class ExecutionStatistics:
    """How the execution has gone since the start.

    Attributes:
        latency: seconds from request to chunk, median and 99th percentile of the last 256; NaN before the first.
        num_chunks: chunks played from. num_discarded: too old, all passed, or from before a reset. num_failed:
            inferences that raised or gave no finite chunk. num_skipped: actions whose step had passed on arrival.
        num_starved: steps without an action, after the first chunk.
        waiting: seconds that the running inference has taken so far; 0 when none runs.
        error: text of the last failure; empty when the last inference went well.
    """

    latency: tuple[float, float]
    num_chunks: int
    num_discarded: int
    num_failed: int
    num_skipped: int
    num_starved: int
    waiting: float
    error: str


@dataclass(frozen=True)
class _Chunk:
    number: int
    start: int
    actions: np.ndarray  # float32 (H, A)

    def covers(self, step: int) -> bool:
        return self.start <= step < self.start + len(self.actions)


@dataclass(frozen=True)
class _Fade:
    """A change of source: `offset` float64 (A,) is added in full at step `start`, and less and less after it."""

    numbers: tuple[int, ...]  # of the chunks that it leads to
    start: int
    offset: np.ndarray


_NO_FADE = _Fade((), 0, np.zeros(0))


class ChunkExecutor:
    """See the module. `submit` and `next_action` return at once, whatever the policy does.

    Args:
        infer: the policy, called in a thread of its own, one call at a time.
        clock: monotonic seconds, the same that stamps observations.
        silence: seconds since the policy server's last sign of life; infinite where it is not connected.
    """

    def __init__(
        self,
        infer: Infer | Callable[..., np.ndarray],
        config: ExecutionConfig,
        clock: Callable[[], float] = time.monotonic,
        silence: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.config = config
        self._silence = silence
        self._infer: Callable[..., np.ndarray] = infer
        self._clock = clock
        self._lock = threading.Condition()
        self._chunks: list[_Chunk] = []  # oldest first
        self._pending: tuple[RobotObservation, int, float] | None = None  # with the time of `submit`
        self._step = -(2**62)
        self._generation = 0
        self._closed = False
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None
        self._forget()
        self._latencies: deque[float] = deque(maxlen=256)
        rtc = config.real_time_chunking
        self._delays: deque[float] = deque(maxlen=rtc.num_delays if rtc else 1)  # from `submit` on, so a wait counts
        self._num_chunks = self._num_discarded = self._num_failed = self._num_skipped = self._num_starved = 0
        self._error = ""

    # --- the control loop's side --------------------------------------------------------------

    def submit(self, observation: RobotObservation, step: int) -> None:
        """Offer the newest observation, made before control step `step`. An older one that waits is replaced."""
        with self._lock:
            self._pending = (observation, step, self._clock())
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="chunks", daemon=True)
                self._thread.start()
            self._lock.notify()

    def next_action(self, step: int) -> Command | None:
        """The action for control step `step`; None where no chunk covers it."""
        with self._lock:
            self._step = step
            self._forget_a_dead_servers_chunks()
            self._chunks = [chunk for chunk in self._chunks if chunk.start + len(chunk.actions) > step]
            if self.config.refill_at is not None:
                self._lock.notify()
            sources = self._sources(step)
            if not sources:
                self._step = step - 1  # It has not passed: nothing is played, and it is asked for again.
                self._num_starved += self._num_chunks > 0
                self._fade = _NO_FADE
                if self._last is not None and self.config.kind == "velocity":
                    self._last = np.zeros_like(self._last)
                return None
            values = self._blend(sources, step)
        return Command(values.astype(np.float32), "policy", self._clock())

    def reset(self) -> None:
        """Drop everything, also what is being computed: a new episode, a person took over, a stop."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """End the thread; one that hangs in the policy is left to end by itself. May be called twice."""
        with self._lock:
            self._closed = True
            self._drop()
            self._lock.notify()

    def statistics(self) -> ExecutionStatistics:
        """How it goes."""
        with self._lock:
            latency = np.quantile(self._latencies, [0.5, 0.99]) if self._latencies else (math.nan, math.nan)
            since = self._busy_since
            return ExecutionStatistics(
                latency=(float(latency[0]), float(latency[1])),
                num_chunks=self._num_chunks,
                num_discarded=self._num_discarded,
                num_failed=self._num_failed,
                num_skipped=self._num_skipped,
                num_starved=self._num_starved,
                waiting=0.0 if since is None else self._clock() - since,
                error=self._error,
            )

    @property
    def trouble(self) -> str:
        """Why there may be no action: the last failure's text, or how long the policy has computed; else empty."""
        with self._lock:
            waiting = 0.0 if self._busy_since is None else self._clock() - self._busy_since
            return self._error or (f"the policy has not answered for {waiting:.1f} s" if waiting > 0 else "")

    # --- what to play -------------------------------------------------------------------------

    def _forget_a_dead_servers_chunks(self) -> None:
        silence = self._silence()
        if not self._chunks or silence <= self.config.max_blind:
            return
        self._chunks = []
        if silence == math.inf:
            self._error = "the connection to the policy server is lost"
        else:
            self._error = f"no sign of life from the policy server for {silence:.1f} s (execution.max_blind)"

    def _sources(self, step: int) -> list[_Chunk]:
        """The chunks that make the action of a step, oldest first."""
        covering = [chunk for chunk in self._chunks if chunk.covers(step)]
        return covering if self.config.ensemble is not None else covering[-1:]

    def _mean(self, sources: list[_Chunk], step: int) -> np.ndarray:
        """What these chunks say of a step, float64 (A,); weights as in ACT (arXiv 2304.13705), the oldest heaviest."""
        said = np.stack([chunk.actions[step - chunk.start] for chunk in sources]).astype(np.float64)
        weights = np.exp(-(self.config.ensemble or 0.0) * np.arange(len(sources)))
        return weights @ said / weights.sum()

    def _blend(self, sources: list[_Chunk], step: int) -> np.ndarray:
        """The action of a step. At a change of sources, what was played last and what the new ones say of that step
        differ by an offset, which then fades linearly: so the change from step to step is the new sources' own plus
        at most offset / blend_steps."""
        self._fade = self._fade_to(sources, step)
        self._last = self._mean(sources, step) + self._faded(self._fade, step)
        return self._last

    def _fade_to(self, sources: list[_Chunk], step: int) -> _Fade:
        """What fades when a step is played from these sources."""
        numbers = tuple(chunk.number for chunk in sources)
        if numbers == self._fade.numbers:
            return self._fade
        offset = np.zeros(sources[-1].actions.shape[1])
        if self._last is not None and self.config.blend_steps > 0:
            known = [chunk for chunk in sources if chunk.covers(step - 1)]
            offset = self._last - (self._mean(known, step - 1) if known else self._mean(sources, step))
            offset[list(self.config.unblended)] = 0.0
        return _Fade(numbers, step - 1, offset)

    def _faded(self, fade: _Fade, step: int) -> np.ndarray:
        """What is left of a fade at a step."""
        return max(0.0, 1.0 - (step - fade.start) / max(1, self.config.blend_steps)) * fade.offset

    def _forget(self) -> None:
        self._last: np.ndarray | None = None
        self._fade = _NO_FADE

    def _drop_chunks(self) -> None:
        self._generation += 1
        self._chunks, self._pending = [], None

    def _drop(self) -> None:
        self._drop_chunks()
        self._step = -(2**62)
        self._forget()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            observation, step, asked, generation, extra = job
            start = self._clock()
            chunk, error = None, ""
            try:
                chunk = np.asarray(self._infer(observation, **extra), np.float32)
                if chunk.ndim != 2 or chunk.size == 0 or not np.isfinite(chunk).all():
                    chunk, error = None, f"the policy gave a chunk of shape {chunk.shape}, or NaN in it"
            except Exception as failure:  # the thread's edge: told by `statistics`, and the robot holds meanwhile
                error = f"{type(failure).__name__}: {failure}"
            self._take(chunk, error, observation, step, generation, asked, start)

    def _next_job(self) -> tuple[RobotObservation, int, float, int, dict[str, object]] | None:
        with self._lock:
            while not self._closed and (self._pending is None or not self._is_due()):
                self._lock.wait()
            if self._closed or self._pending is None:
                return None
            (observation, step, asked), self._pending = self._pending, None
            self._busy_since = self._clock()
            rtc = self.config.real_time_chunking
            return observation, step, asked, self._generation, self._prefix(step, rtc) if rtc else {}

    def _is_due(self) -> bool:
        if self.config.refill_at is None or not self._chunks:
            return True
        last = self._chunks[-1]
        return last.start + len(last.actions) - self._step <= self.config.refill_at

    def _prefix(self, step: int, rtc: RealTimeChunking) -> dict[str, object]:
        """What is played from `step` on, and how many of it before an answer that takes as long as the last ones."""
        covering = [chunk for chunk in self._chunks if chunk.covers(step)]
        if not covering:
            return {}
        newest = covering[-1]
        rest = newest.actions[step - newest.start :].astype(np.float64)
        following = max(step, self._step + 1)
        if newest.covers(following):
            fade = self._fade_to([newest], following)
            rest += [self._faded(fade, max(step + i, fade.start)) for i in range(len(rest))]
        frozen = min(math.ceil(max(self._delays, default=0.0) * self.config.control_hz), len(rest))
        extra: dict[str, object] = {"prefix": rest.astype(np.float32), "num_frozen": frozen}
        return extra | ({"guidance": rtc.guidance} if rtc.guidance else {})

    def _take(
        self,
        actions: np.ndarray | None,
        error: str,
        observation: RobotObservation,
        step: int,
        generation: int,
        asked: float,
        start: float,
    ) -> None:
        with self._lock:
            now = self._clock()
            self._busy_since = None
            self._error = error
            if actions is None:
                self._num_failed += 1
                if generation == self._generation:  # what is queued was made before the failure: not to be executed
                    self._drop_chunks()
                self._lock.wait_for(lambda: self._closed, RETRY_AFTER)
                return
            self._latencies.append(now - start)
            self._delays.append(now - asked)
            if generation != self._generation or now - observation.stamp > self.config.max_age:
                self._num_discarded += 1
                return
            if self._chunks and self._chunks[-1].actions.shape[1] != actions.shape[1]:
                self._drop()
            skipped = max(0, self._step + 1 - step)
            if skipped >= len(actions):
                self._num_discarded += 1
                self._error = (
                    f"the policy took {now - start:.2f} s: all {len(actions)} steps of its chunk had passed "
                    f"(they last {len(actions) / self.config.control_hz:.2f} s)"
                )
                return
            self._num_chunks += 1
            self._num_skipped += skipped
            self._chunks.append(_Chunk(self._num_chunks, step, actions))
