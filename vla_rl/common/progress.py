"""Progress of a run: seconds by stage, bars in a terminal, the step that it is at, in status.json. Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import ClassVar, Literal, Protocol

from pydantic import Field

from vla_rl.common.atomic import is_running, write_text_atomic
from vla_rl.config import Config, read_written

State = Literal["running", "stopped", "finished"]

_CLOCKS_DIFFER = 2.0  # Seconds; a status says its time in whole ones.
_PAGE_SECONDS, _PAGE_SHARE = 10.0, 0.05  # A page at most so often, and for at most this share of the time.


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
        self._waits_for = waits_for if waits_for is not None and waits_for.startswith(("cuda", "mps")) else None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def restart(self, now: float | None = None) -> None:
        """Forget what was counted; the total begins now."""
        self.seconds.clear()
        self._started = time.perf_counter() if now is None else now

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time inside the `with` block to `stage`."""
        if self._waits_for:
            _wait_for(self._waits_for)
        start = time.perf_counter()
        try:
            yield
            if self._waits_for:
                _wait_for(self._waits_for)
        finally:
            self.seconds[stage] += time.perf_counter() - start
            Stopwatch.num_measured += 1

    def report(self) -> dict[str, float]:
        """Seconds by stage since the last report, with `total` and `other` (total minus the stages)."""
        now = time.perf_counter()
        total, spent = now - self._started, dict(self.seconds)
        self.restart(now)
        return spent | {"other": total - sum(spent.values()), "total": total}


def _wait_for(device: str) -> None:
    """Wait until a GPU has done all that it was given."""
    import torch

    if device == "mps":
        torch.mps.synchronize()
    else:
        torch.cuda.synchronize(device)


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
        show: False shows nothing. transient: it disappears at the end, and a file gets no last line.
    """

    def __init__(self, text: str, total: int, show: bool, transient: bool = False) -> None:
        from rich import progress as rich

        columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[rate]}")
        columns = (*columns, rich.TimeRemainingColumn(), "{task.fields[said]}")
        self.bar = rich.Progress(*columns, transient=transient, disable=not show)
        self.task = self.bar.add_task(text, total=total, rate="", said="")
        self.started = self.printed = time.monotonic()
        self.first: int | None = None

    def show(self, done: int, unit: str, said: str) -> None:
        """Tell that so many are done; the rate counts from the first call."""
        now = time.monotonic()
        self.first = done if self.first is None else self.first
        rate = (done - self.first) / max(now - self.started, 1e-9)
        self.bar.update(self.task, completed=done, rate=f"{rate:.1f}{unit}", said=said)
        if not (self.bar.disable or self.bar.console.is_terminal) and now - self.printed >= LINE_EVERY:
            self.printed = now
            self.bar.console.print(self.bar.get_renderable())


class Progress(Protocol):
    """Opens what is told of each episode that ends: of `total`, of which `done` have ended before."""

    def __call__(self, total: int, *, done: int = 0) -> AbstractContextManager[Callable[[Outcome], None]]: ...


@contextmanager
def episode_progress(
    total: int, text: str = "episodes", *, done: int = 0, show: bool = True, transient: bool = False
) -> Iterator[Callable[[Outcome], None]]:
    """Yield what to call with each finished episode; it shows how many there are and how many succeeded in each mode.

    Args:
        total: episodes expected. done: of them, before. show, transient: see `_Bar`.
    """
    outcomes, bar = defaultdict[str, list[bool]](list), _Bar(text, total, show, transient)
    with bar.bar:
        bar.show(done, "/s", "")

        def on_episode(episode: Outcome) -> None:
            nonlocal done
            done += 1
            found = outcomes[mode := getattr(episode, "mode", "")]
            found += [episode.success] * (not episode.lost)
            share = f"{100 * fmean(found):.0f} % of {len(found)}" if found else ""
            bar.show(done, "/s", f"{mode}: {share}" if mode and share else share)

        yield on_episode


silent_progress: Progress = partial(episode_progress, show=False)


@contextmanager
def step_progress(text: str, total: int, show: bool, unit: str = " steps/s") -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(step, said)`, which shows how many of `total` steps are taken, and what is said of the last.

    Args:
        unit: of the rate.
    """
    bar = _Bar(text, total, show)
    with bar.bar:
        yield lambda step, said: bar.show(step, unit, said)


# --- where a run is --------------------------------------------------------------------------------


class RunStatus(Config):
    """Status of a run.

    Attributes:
        step: what it is doing; number `number` of `of`, from 1. done, total: iterations of the run, whatever the step
            is; 0, 0: not said.
        state: "running" until it ends; "stopped": by an error or a person.
        updated: local time, ISO 8601. process: its number on the machine `host`.
        dashboard: address of a page of the machines at work; empty: there is none.
    """

    step: str
    number: int
    of: int
    done: int = 0
    total: int = 0
    state: State = "running"
    updated: str = Field(default_factory=lambda: datetime.now().isoformat(timespec="seconds"))
    process: int = Field(default_factory=os.getpid)
    host: str = Field(default_factory=socket.gethostname)
    dashboard: str = ""

    def write(self, file: Path) -> None:
        """Write it as a run's status.json."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, self.model_dump_json(indent=1) + "\n")

    @property
    def is_running(self) -> bool:
        """Whether the run goes on, as far as this machine can tell: a killed run could not say so."""
        return self.state == "running" and (self.host != socket.gethostname() or self._is_its_process())

    @property
    def is_anothers(self) -> bool:
        """Whether another process of this machine is at the run."""
        return self.is_running and self.host == socket.gethostname() and self.process != os.getpid()

    def _is_its_process(self) -> bool:
        """Whether the run's process lives; one that began after the run's last word only has its number."""
        if not is_running(self.process):
            return False
        try:
            facts = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # Not on Linux.
            return True
        began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(facts[19]) / os.sysconf("SC_CLK_TCK")
        is_dead = facts[0] in ("Z", "X")
        return not is_dead and began <= datetime.fromisoformat(self.updated).timestamp() + _CLOCKS_DIFFER

    def text(self) -> str:
        """Say it for people; empty of a finished run."""
        if self.state == "finished":
            return ""
        state = "is running" if self.is_running else "was stopped before its end"
        what = "" if self.step == "iterations" else " iterations"
        done = f", {self.done} of {self.total}{what} done" if self.total else ""
        at = self.updated.replace("T", " ")
        return f"This run {state}: step {self.number} of {self.of}, {self.step}{done}. As of {at}."


def read_status(file: Path) -> RunStatus | None:
    """What a run says of itself; None of a folder without a status.json.

    Raises:
        ConfigError: it is damaged, or of a version that says other things.
    """
    if not file.is_file():
        return None
    return read_written(RunStatus, file, "Delete it; a run that goes on writes it anew")


@dataclass
class RunSteps:
    """Steps of a run, written to its status.json.

    Attributes:
        file: the run's status.json. names: of all steps; the last is the report. total: the run's iterations.
        write_page: writes the page of a run's folder.
        show: print each step. write: into the folder, which one process of several does.
        step: the present one; empty before the first.
        dashboard: address of a page of the machines at work; empty: there is none.
    """

    file: Path
    names: tuple[str, ...]
    total: int
    write_page: Callable[[Path], object]
    show: bool
    write: bool
    step: str = field(default="", init=False)
    dashboard: str = field(default="", init=False)
    _page_due: float = field(default=0.0, init=False)

    def begin(self, step: str, iteration: int) -> None:
        """Begin a step after so many iterations; nothing where it has begun."""
        if step != self.step and self.write:
            where, self.step = "" if self.step else f"run: {self.file.parent}\n", step
            if self.show:
                print(f"{where}step {self.names.index(step) + 1} of {len(self.names)}: {step}", flush=True)
            self._write(iteration)

    def _write(self, iteration: int, state: State = "running") -> None:
        place = {"step": self.step, "number": self.names.index(self.step) + 1, "of": len(self.names)}
        RunStatus(**place, done=iteration, total=self.total, state=state, dashboard=self.dashboard).write(self.file)

    def update(self, iteration: int) -> None:
        """Tell of a finished iteration or evaluation: on the page too, unless that was written just now."""
        if not self.write:
            return
        self._write(iteration)
        started = time.monotonic()
        if started >= self._page_due:
            self.write_page(self.file.parent)
            ended = time.monotonic()
            self._page_due = ended + max(_PAGE_SECONDS, (ended - started) / _PAGE_SHARE)

    def end(self, iteration: int, state: State) -> None:
        """End the run as "finished" or "stopped", on the page too."""
        if self.write and self.step:
            self._write(iteration, state)
            self.write_page(self.file.parent)

    def conclude(self) -> None:
        """Say of a run with its last evaluation that it is finished, where a kill came before it could say so."""
        status = read_status(self.file)
        if status is not None and status.state != "finished":
            self.step = self.names[-1]
            self.end(status.done, "finished")
