"""Progress bars, and a stopwatch by stage. Imports nothing heavy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import fmean
from typing import ClassVar, Protocol


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


LINE_EVERY = 60.0  # seconds, where the output is a file


class Outcome(Protocol):
    """What has become of an episode."""

    @property
    def success(self) -> bool: ...
    @property
    def lost(self) -> bool: ...


class _Bar:
    """A count, a rate, the time that remains, and what is said: drawn in a terminal, a line a minute in a file.

    Args:
        transient: it disappears at the end, and a file gets no last line.
    """

    def __init__(self, text: str, total: int, transient: bool = False) -> None:
        from rich import progress as rich

        columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[rate]}")
        self.bar = rich.Progress(*columns, rich.TimeRemainingColumn(), "{task.fields[said]}", transient=transient)
        self.task = self.bar.add_task(text, total=total, rate="", said="")
        self.started = self.printed = time.monotonic()
        self.first: int | None = None

    def show(self, done: int, unit: str, said: str) -> None:
        """Tell that so many are done; the rate counts from the first call."""
        now = time.monotonic()
        self.first = done if self.first is None else self.first
        rate = (done - self.first) / max(now - self.started, 1e-9)
        self.bar.update(self.task, completed=done, rate=f"{rate:.1f}{unit}", said=said)
        if not self.bar.console.is_terminal and now - self.printed >= LINE_EVERY:
            self.printed = now
            self.bar.console.print(self.bar.get_renderable())


class Progress(Protocol):
    """Opens what is told of each episode that ends: of `total`, of which `done` have ended before."""

    def __call__(self, total: int, *, done: int = 0) -> AbstractContextManager[Callable[[Outcome], None]]: ...


@contextmanager
def silent_progress(total: int, *, done: int = 0) -> Iterator[Callable[[Outcome], None]]:
    """Show nothing."""
    yield lambda episode: None


@contextmanager
def episode_progress(
    total: int, text: str = "episodes", *, done: int = 0, show: bool = True, transient: bool = False
) -> Iterator[Callable[[Outcome], None]]:
    """Yield what to call with each finished episode, which shows how many there are and how many of them succeeded.

    Of an evaluation's records it says so of each mode apart.

    Args:
        total: episodes expected. done: of them, before.
        show: False shows nothing.
        transient: the bar disappears at the end, and a file gets no last line.
    """
    if not show:
        yield lambda episode: None
        return
    outcomes, modes, bar = list[bool](), set[str](), _Bar(text, total, transient)
    with bar.bar:
        bar.show(done, "/s", "")

        def on_episode(episode: Outcome) -> None:
            nonlocal done
            done += 1
            mode = getattr(episode, "mode", "")
            if mode not in modes:
                modes.add(mode)
                outcomes.clear()
            outcomes.extend([episode.success] * (not episode.lost))
            share = f"{100 * fmean(outcomes):.0f} % of {len(outcomes)}" if outcomes else ""
            bar.show(done, "/s", f"{mode}: {share}" if mode and share else share)

        yield on_episode


@contextmanager
def step_progress(text: str, total: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(step, said)`, which shows how many of `total` steps are taken, and what is said of the last."""
    if not show:
        yield lambda step, said: None
        return
    bar = _Bar(text, total)
    with bar.bar:
        yield lambda step, said: bar.show(step, " steps/s", said)
