"""Where a run is: the step it is at, which its status.json and its page say while it runs and after it stopped."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from vla_rl.common.atomic import is_running, write_text_atomic
from vla_rl.config import Config, ConfigError

if TYPE_CHECKING:
    from vla_rl.common.run_folder import RunFolder


State = Literal["running", "stopped", "finished"]

_CLOCKS_DIFFER = 2.0  # Seconds; a status says its time in whole ones.


class RunStatus(Config):
    """What a run says of itself.

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
    run: RunFolder, step: str, number: int, of: int, done: int, total: int, state: State, dashboard: str = ""
) -> None:
    """Write a run's status.json; see `RunStatus`."""
    now, process, host = datetime.now().isoformat(timespec="seconds"), os.getpid(), socket.gethostname()
    values = step, number, of, done, total, state, now, process, host, dashboard
    run.path.mkdir(parents=True, exist_ok=True)
    write_text_atomic(run.status, json.dumps(dict(zip(RunStatus.model_fields, values, strict=True)), indent=1) + "\n")


def read_status(run: RunFolder) -> RunStatus | None:
    """What a run says of itself; None of a folder without a status.json.

    Raises:
        ConfigError: it is damaged, or of a version that says other things.
    """
    if not run.status.is_file():
        return None
    try:
        return RunStatus.model_validate_json(run.status.read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        what = ".".join(map(str, found["loc"])) or "the file"
        raise ConfigError(
            f"{run.status}: {what}: {found['msg']}. Delete it; a run that goes on writes it anew"
        ) from None
