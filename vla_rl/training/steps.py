"""The steps of an RL run: each is printed as it begins, written to status.json, and shown on the run's page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vla_rl.common.run_status import State, read_status, write_status

if TYPE_CHECKING:
    from vla_rl.common.run_folder import RunFolder
    from vla_rl.training.train import TrainConfig

BEFORE, RL, AFTER, REPORT = "evaluation before", "iterations", "evaluation after", "report"
# By train.evaluate.
STEPS = {
    "before_and_after": (BEFORE, RL, AFTER, REPORT),
    "after": (RL, AFTER, REPORT),
    "never": (RL, REPORT),
}
_PAGE_SECONDS, _PAGE_SHARE = 10.0, 0.05  # A page at most so often, and for at most this share of the time.


@dataclass
class RunSteps:
    """Says where an RL run is.

    Attributes:
        show: print it. write: to the folder, which one process of several does.
        step: the present one; empty before the first.
        dashboard: address of a page of the machines at work; empty: there is none.
    """

    run: RunFolder
    config: TrainConfig
    show: bool
    write: bool
    step: str = field(default="", init=False)
    dashboard: str = field(default="", init=False)
    _page_due: float = field(default=0.0, init=False)

    def begin(self, step: str, iteration: int) -> None:
        """Begin a step after so many iterations; nothing where it has begun."""
        if step != self.step and self.write:
            where, self.step = "" if self.step else f"run: {self.run.path}\n", step
            if self.show:
                names = STEPS[self.config.evaluate]
                print(f"{where}step {names.index(step) + 1} of {len(names)}: {step}", flush=True)
            self._write(iteration)

    def _write(self, iteration: int, state: State = "running") -> None:
        names, total = STEPS[self.config.evaluate], self.config.iterations
        number, of = names.index(self.step) + 1, len(names)
        write_status(self.run, self.step, number, of, iteration, total, state, self.dashboard)

    def update(self, iteration: int) -> None:
        """Tell of a finished iteration or evaluation: on the page too, unless that was written just now."""
        if not self.write:
            return
        self._write(iteration)
        started = time.monotonic()
        if started >= self._page_due:
            self._page()
            ended = time.monotonic()
            self._page_due = ended + max(_PAGE_SECONDS, (ended - started) / _PAGE_SHARE)

    def end(self, iteration: int, state: State) -> None:
        """End the run as "finished" or "stopped", on the page too."""
        if self.write and self.step:
            self._write(iteration, state)
            self._page()

    def conclude(self) -> None:
        """Say of a run with its last evaluation that it is finished, where a kill came before it could say so."""
        status = read_status(self.run)
        if status is not None and status.state != "finished":
            self.step = REPORT
            self.end(status.done, "finished")

    def _page(self) -> None:
        from vla_rl.report.report import write_report

        write_report(self.run.path)
