"""Runs of the program that end where they are started, in place of processes of their own, which import all anew."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.cli.options import PROGRAM
from vla_rl.workflows import jobs


class RunHere(subprocess.Popen):
    """A `vla-rl` command that has run in this process; its output is in its log."""

    def __init__(self, command: Sequence[str], stdout: IO[bytes], **_: Any) -> None:
        assert tuple(command[: len(PROGRAM)]) == PROGRAM
        done = CliRunner().invoke(app, list(command[len(PROGRAM) :]))
        stdout.write(done.output.encode())
        self.returncode = done.exit_code

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def __del__(self) -> None:
        """There is no process."""


def run_jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of sweeps, ablations and loops start no process."""
    monkeypatch.setattr(jobs, "start_child", RunHere)
