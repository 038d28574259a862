"""Where a run's wall time goes, by stage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by stage. Stages must not nest, so that they sum to at most the total."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time inside the `with` block to `stage`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def report(self) -> dict[str, float]:
        """Seconds by stage since the last report, with `total` and `other` (total minus the stages)."""
        now = time.perf_counter()
        total = now - self._started
        result = dict(self.seconds)
        result["other"] = total - sum(self.seconds.values())
        result["total"] = total
        self.seconds.clear()
        self._started = now
        return result
