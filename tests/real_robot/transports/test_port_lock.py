"""A serial line, here a pseudo-terminal, for one process: the second is refused, and told by whom."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from processes import ROOT, until

from real_robot.transports.base import TransportError
from real_robot.transports.lerobot import LeRobotConfig, PortLock

HOLD = """
import sys
from real_robot.transports.lerobot import PortLock
lock = PortLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def port() -> Iterator[str]:
    line, end = pty.openpty()
    yield os.ttyname(end)
    os.close(line)
    os.close(end)


def test_the_second_is_refused_until_the_first_has_ended(port: str) -> None:
    command = [sys.executable, "-c", HOLD, port]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(TransportError, match=rf"driven already, by process {first.pid} on .* since \d{{4}}-"):
            PortLock(port)
        with pytest.raises(TransportError, match="driven already"):
            LeRobotConfig(robot="so101_follower", port=port).open()
        first.kill()
    until(lambda: PortLock(port), "the port", 10)


def test_a_process_that_has_closed_it_leaves_it_free(port: str) -> None:
    first = PortLock(port)
    with pytest.raises(TransportError, match=f"process {os.getpid()} "):
        PortLock(port)
    first.close()
    first.close()
    PortLock(port).close()


def test_a_port_that_is_not_there_is_left_to_the_driver() -> None:
    PortLock("/dev/no_such_port").close()
