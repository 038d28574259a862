"""Watchdog of hanging processes: at each exchange, those that came say who did not and where it was last seen.

A thread in each process tells the launcher's store, several times within the time limit, that the process lives, how
often it got on (it met the others, or finished an episode), and where its program is. A process that is stopped, or
whose machine is gone, falls silent; one that is stuck lives on without getting on. Either ends the run of those that
wait for it, after the limit.

The store must outlive a process that hangs: torchrun keeps it in its own process. Another launcher may leave it to
process 0: then the others notice all but process 0 being stopped.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from vla_rl.common.progress import Stopwatch

_LOOKS = 20  # Within the limit.
_SHORTEST, _LONGEST = 0.05, 5.0  # Seconds between looks.


class HungProcessError(RuntimeError):
    """A process that others waited for did not come within `hang_minutes`; the message names it."""


class Watch:
    """What one process tells of itself and knows of the others.

    Args:
        store: that all processes share.
        limit: after which one that does not get on counts as hung.
    """

    def __init__(self, store: Any, rank: int, size: int, limit: timedelta) -> None:
        self.rank, self.size, self.limit = rank, size, limit.total_seconds()
        self._store = PrefixStore("vla_rl/watch", store)
        self._own_line = PrefixStore("vla_rl/watch", store.clone())  # A wait in one holds up none in the other.
        self._num_meetings = self._num_looks = 0
        self._pause = min(max(self.limit / _LOOKS, _SHORTEST), _LONGEST)
        self._seen: dict[int, _Seen] = {r: _Seen() for r in range(size) if r != rank}
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_around, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop telling of this process."""
        self._closed.set()
        self._thread.join(self._pause + 1.0)

    def meet(self, patient: bool = False) -> None:
        """Wait until every process has called this as often.

        Args:
            patient: wait for those that are stuck as well, as long as they live: one does long work for all.

        Raises:
            HungProcessError: a process that has not come has not got on for the limit.
        """
        self._num_meetings += 1
        number, started = self._num_meetings, time.monotonic()
        keys = [f"met/{number}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        while True:
            try:
                self._store.wait(keys, timedelta(seconds=self._pause))
                break
            except dist.DistStoreError:
                late = [rank for rank in self._seen if not self._store.check([keys[rank]])]
                hung = [rank for rank in late if self._seen[rank].is_hung(self.limit, started, patient)]
                if hung:
                    raise HungProcessError(self._message(hung)) from None
        if number > 1:  # Who has come to this meeting needs the one before no longer.
            self._store.delete_key(f"met/{number - 1}/{self.rank}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """In the block, an exchange of tensors that timed out (it is inside torch, and names nobody) is explained.

        Raises:
            HungProcessError: in place of torch's error.
        """
        try:
            yield
        except RuntimeError as error:
            silent = [rank for rank, seen in self._seen.items() if seen.silence > self.limit / 2]
            stuck = [rank for rank, seen in self._seen.items() if seen.standstill > self.limit / 2]
            late = silent or (stuck if "imed out" in str(error) else [])  # This process's own errors time out, too.
            if isinstance(error, HungProcessError) or not late:
                raise
            raise HungProcessError(self._message(late)) from error

    def _message(self, hung: list[int]) -> str:
        found = "; ".join(f"process {rank} of {self.size} {self._seen[rank].text(self.limit)}" for rank in hung)
        return (
            f"process {self.rank} waited in vain for {', '.join(map(str, hung))}, which for {self.limit:.0f} s "
            f"(hang_minutes={self.limit / 60:g}) did not get on: {found}. Look at its machine and its "
            "messages, then go on with --resume; if it had work for so long, raise hang_minutes."
        )

    # --- in the thread -----------------------------------------------------------------------

    def _look_around(self) -> None:
        others = list(self._seen)
        while not self._closed.is_set():
            self._num_looks += 1
            marks = [self._num_meetings, Stopwatch.num_measured]
            state = {"look": self._num_looks, "marks": marks, "place": self._place()}
            with suppress(dist.DistError):  # The store is gone or slow: what is heard of the others stays old.
                self._own_line.set(f"state/{self.rank}", json.dumps(state))
                if self._own_line.check([f"state/{rank}" for rank in others]):
                    for rank, text in zip(
                        others, self._own_line.multi_get([f"state/{r}" for r in others]), strict=True
                    ):
                        self._seen[rank].take(json.loads(text))
            self._tell_who_is_silent()
            self._closed.wait(self._pause)

    def _tell_who_is_silent(self) -> None:
        """Say it once: where the main thread is inside an exchange of tensors, it is NCCL that ends this process."""
        silent = [rank for rank, seen in self._seen.items() if seen.silence > self.limit and not seen.told]
        for rank in silent:
            self._seen[rank].told = True
            print(f"warning: {self._message([rank])}", file=sys.stderr, flush=True)

    def _place(self) -> str:
        """The line that the main thread is at."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return "nowhere"
        path = Path(frame.f_code.co_filename)
        return f"at {path.parent.name}/{path.name}:{frame.f_lineno}, in {frame.f_code.co_name}"


class _Seen:
    """What was last heard of another process, and when by this one's clock."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.alive_at = self.marked_at = time.monotonic()
        self.told = False

    @property
    def silence(self) -> float:
        """Seconds without a sign of life."""
        return time.monotonic() - self.alive_at

    @property
    def standstill(self) -> float:
        """Seconds without getting on."""
        return time.monotonic() - self.marked_at

    def take(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        if state["look"] != self.state.get("look"):
            self.alive_at = now
        if state["marks"] != self.state.get("marks"):
            self.marked_at = now
        self.state = state

    def is_hung(self, limit: float, awaited_since: float, patient: bool) -> bool:
        waited = time.monotonic() - max(self.marked_at, awaited_since)
        return self.silence > limit or (not patient and waited > limit)

    def text(self, limit: float) -> str:
        place = self.state.get("place", "nowhere")
        if self.silence > limit / 2:
            return f"has given no sign of life for {self.silence:.0f} s (stopped, or its machine is gone), last {place}"
        return f"is alive, and for {self.standstill:.0f} s {place}"
