"""One process for a serial port, by the operating system: its holder is named, and it is free when that one ends."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from pathlib import Path

from real_robot.transports.base import TransportError


class PortLock:
    """An exclusive lock (`flock`) on a device file, held until `close` or the end of the process.

    Programs that lock their ports, such as pyserial with `exclusive`, are kept out too. Nothing is locked where there
    is no such port, which the driver tells better, or where the system opens a port for one process alone (Windows).

    Raises:
        TransportError: another process has it.
    """

    def __init__(self, port: str) -> None:
        self._file = -1
        if os.name != "posix":
            return
        import fcntl

        try:
            self._file = os.open(port, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:  # Whoever opens it in earnest says so.
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = os.fstat(self._file)
            self.close()
            raise TransportError(
                f"port {port} is driven already, by {_holder(found)}. End that first: two that speak on one bus "
                "move the arm as neither meant"
            ) from error

    def close(self) -> None:
        """Free the port. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _holder(file: os.stat_result) -> str:
    """Which process holds a lock on that file, as far as Linux says."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:05:123 0 EOF
            if device in fields and "FLOCK" in fields:
                pid = int(fields[fields.index(device) - 1])
                since = datetime.fromtimestamp(Path(f"/proc/{pid}").stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {pid} on {socket.gethostname()}, since {since} ({name[:80]})"
    except (OSError, ValueError):
        pass  # Not Linux, or it has ended in the meantime: the lock itself is sure all the same.
    return "another process"
