"""How far a run is and where its wall time goes: progress bars, and a stopwatch by stage. Imports nothing heavy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from rich.progress import Progress

    from vla_rl.types import Episode


class Stopwatch:
    """Adds up seconds by stage. Stages must not nest, so that they sum to at most the total.

    A GPU works on while the host goes on: without `waits_for` a stage is the time in which the host hands its work
    over, and the wait for it counts to the stage that next reads a result.

    Attributes:
        num_measured: stages that have ended in this process, by all stopwatches: it grows while something gets done.
    """

    num_measured: ClassVar[int] = 0

    def __init__(self, waits_for: str | None = None) -> None:
        """`waits_for`: a device that a stage's begin and end wait for, which costs time and makes stages exact."""
        self._wait = _wait_of(waits_for)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def restart(self, now: float | None = None) -> None:
        """Forget what was counted; the total begins now."""
        self.seconds.clear()
        self._started = time.perf_counter() if now is None else now

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time inside the `with` block to `stage`."""
        self._wait()
        start = time.perf_counter()
        try:
            yield
            self._wait()
        finally:
            self.seconds[stage] += time.perf_counter() - start
            Stopwatch.num_measured += 1

    def report(self) -> dict[str, float]:
        """Seconds by stage since the last report, with `total` and `other` (total minus the stages)."""
        now = time.perf_counter()
        total, spent = now - self._started, dict(self.seconds)
        self.restart(now)
        return spent | {"other": total - sum(spent.values()), "total": total}


def _wait_of(device: str | None) -> Callable[[], object]:
    """What waits until a GPU has done all that it was given; for other devices, nothing."""
    if device is None or device.partition(":")[0] not in ("cuda", "mps"):
        return lambda: None
    import torch

    return torch.mps.synchronize if device == "mps" else partial(torch.cuda.synchronize, device)


@contextmanager
def episode_progress(
    total: int, text: str = "episodes", *, show: bool = True, transient: bool = False
) -> Iterator[Callable[[Episode], None]]:
    """Yield what to call with each finished episode. A terminal's bar is drawn anew then; a file gets a last line.

    Args:
        total: episodes expected.
        show: False draws nothing.
        transient: the bar disappears at the end, and a file gets nothing.
    """
    if not show:
        yield lambda episode: None
        return
    outcomes, started = list[bool](), time.monotonic()
    with _bar(transient, "success") as bar:
        task = bar.add_task(text, total=total, rate="", success="")

        def on_episode(episode: Episode) -> None:
            outcomes.extend([episode.success] * (not episode.lost))
            bar.advance(task)
            rate = f"{bar.tasks[task].completed / max(time.monotonic() - started, 1e-9):.1f}/s"
            bar.update(task, rate=rate, success=f"{100 * fmean(outcomes):.0f} % success" if outcomes else "")

        yield on_episode


def _bar(transient: bool, last: str) -> Progress:
    """Return a bar with a count, a rate, the time that remains, and the field `last`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[rate]}", TimeRemainingColumn())
    return Progress(*columns, f"{{task.fields[{last}]}}", transient=transient)


@contextmanager
def step_progress(text: str, total: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(step, said)`, which draws how many of `total` steps are taken, and what is said of the last."""
    if not show:
        yield lambda step, said: None
        return
    with _bar(False, "text") as bar:
        task = bar.add_task(text, total=total, rate="", text="")
        started, first = time.monotonic(), None

        def advance(step: int, said: str) -> None:
            nonlocal first
            first = step if first is None else first
            rate = (step - first) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=step, rate=f"{rate:.1f} steps/s", text=said)

        yield advance
