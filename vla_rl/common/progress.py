"""Progress bars over episodes and over steps: how many, how fast, how long yet. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_rl.types import Episode


@contextmanager
def episode_progress(
    total: int, text: str = "episodes", *, show: bool = True, transient: bool = False
) -> Iterator[Callable[[Episode], None]]:
    """Yields what to call with each finished episode.

    In a terminal the bar is drawn anew as episodes end; a file gets one line, at the end.

    Args:
        total: episodes expected.
        show: False draws nothing.
        transient: the bar disappears at the end, and a file gets nothing.
    """
    if not show:
        yield lambda episode: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    ended, played, successes = 0, 0, 0
    started = time.monotonic()
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[success]}"),
    )
    with Progress(*columns, transient=transient) as progress:
        bar = progress.add_task(text, total=total, rate="", success="")

        def on_episode(episode: Episode) -> None:
            nonlocal ended, played, successes
            ended += 1
            played += not episode.lost
            successes += episode.success
            rate = f"{ended / max(time.monotonic() - started, 1e-9):.1f}/s"
            success = f"{100 * successes / played:.0f} % success" if played else ""
            progress.update(bar, completed=ended, rate=rate, success=success)

        yield on_episode


@contextmanager
def step_progress(text: str, total: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(step, said)`, which draws how many of `total` steps are taken, and what is said of the last."""
    if not show:
        yield lambda step, said: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(TextColumn(text), *columns, TextColumn("{task.fields[text]}")) as bar:
        task = bar.add_task("", total=total, rate="", text="")
        started, first = time.monotonic(), None

        def advance(step: int, said: str) -> None:
            nonlocal first
            first = step if first is None else first
            rate = (step - first) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=step, rate=f"{rate:.1f} steps/s", text=said)

        yield advance
