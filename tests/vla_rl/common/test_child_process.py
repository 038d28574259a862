"""Child processes: they end with a parent that is killed, and one that ignores the request to end is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from vla_rl.common.child_process import end_child, start_child

PARENT = """
import sys
from vla_rl.common.child_process import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the signal")
def test_a_child_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_child_that_will_not_end_is_killed():
    child = start_child([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    end_child(child, seconds=0.2)
    assert child.returncode == -signal.SIGKILL
    end_child(child)
