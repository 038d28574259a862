"""Run status: the step that a run is at, printed and in status.json."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from vla_rl.common.atomic import is_running, write_text_atomic
from vla_rl.config import Config, ConfigError

State = Literal["running", "stopped", "finished"]

_CLOCKS_DIFFER = 2.0  # Seconds; a status says its time in whole ones.
_PAGE_SECONDS, _PAGE_SHARE = 10.0, 0.05  # A page at most so often, and for at most this share of the time.


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
    updated: str
    process: int
    host: str
    dashboard: str = ""

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


def write_status(
    file: Path, step: str, number: int, of: int, done: int, total: int, state: State, dashboard: str = ""
) -> None:
    """Write a run's status.json; see `RunStatus`."""
    now, process, host = datetime.now().isoformat(timespec="seconds"), os.getpid(), socket.gethostname()
    values = step, number, of, done, total, state, now, process, host, dashboard
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(dict(zip(RunStatus.model_fields, values, strict=True)), indent=1) + "\n")


def read_status(file: Path) -> RunStatus | None:
    """What a run says of itself; None of a folder without a status.json.

    Raises:
        ConfigError: it is damaged, or of a version that says other things.
    """
    if not file.is_file():
        return None
    try:
        return RunStatus.model_validate_json(file.read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        what = ".".join(map(str, found["loc"])) or "the file"
        raise ConfigError(f"{file}: {what}: {found['msg']}. Delete it; a run that goes on writes it anew") from None


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
        number, of = self.names.index(self.step) + 1, len(self.names)
        write_status(self.file, self.step, number, of, iteration, self.total, state, self.dashboard)

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
