"""Child processes that end with the process that started them, also where that one is killed outright.

The workers of `sim.vector` and the hosts of `sim.remote` watch for the end of their parent themselves: they may be
started from a thread that ends before they do, and a host may run on another machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1  # of Linux' prctl


def start_child(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program that Linux kills when the calling thread ends, and so when this process is killed.

    Elsewhere it outlives a process that is killed outright. Options are those of `subprocess.Popen`.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It ended before the kernel was asked.
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=start_new_session,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 (it only asks the kernel)
    )


def end_child(process: subprocess.Popen[bytes], seconds: float | None = None) -> None:
    """Ask a child to end and wait for it; kill it where it takes longer than `seconds`. May be called twice."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
