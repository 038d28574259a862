"""Where a run is: the step it is at, which its status.json and its page say while it runs and after it stopped."""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from vla_rl.common.atomic import is_running, write_text_atomic
from vla_rl.config import Config

if TYPE_CHECKING:
    from vla_rl.common.run_folder import RunFolder


State = Literal["running", "stopped", "finished"]


class RunStatus(Config):
    """What a run says of itself.

    Attributes:
        step: what it is doing; number `number` of `of`, from 1. done, total: how far it is in that; 0, 0: not said.
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
        here = self.host == socket.gethostname()
        return self.state == "running" and (not here or is_running(self.process))

    def text(self) -> str:
        """Say it for people; empty of a finished run."""
        if self.state == "finished":
            return ""
        state = "is running" if self.is_running else "was stopped before its end"
        done = f", {self.done} of {self.total} done" if self.total else ""
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
    """What a run says of itself; None of a folder without a status.json."""
    return RunStatus.model_validate_json(run.status.read_text()) if run.status.is_file() else None
