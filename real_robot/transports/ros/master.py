"""A ROS master (rosmaster) as a child process, for a robot that has none running: simulation and tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import xmlrpc.client
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from xml.parsers.expat import ExpatError

from real_robot.transports.ros.install import RosInstallError, enable, python_path, ros_folder
from vla_rl.common.child_process import end_child, start_child

START_SECONDS = 20.0
_NO_MASTER = (xmlrpc.client.Error, HTTPException, ExpatError, ValueError, TypeError)  # an answer cut off, or another's

# rosmaster is a program of its own; its package has `rosmaster_main`, which takes the program's arguments.
_PROGRAM = "import sys, rosmaster; rosmaster.rosmaster_main(['--core', '-p', sys.argv[1]])"


def ros_environment(port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """This process's environment, for a child that is a node of the master on `port`."""
    path = os.pathsep.join([p for p in (os.environ.get("PYTHONPATH", ""), str(python_path())) if p])
    return {**os.environ, "PYTHONPATH": path, "ROS_MASTER_URI": f"http://{host}:{port}", "ROS_IP": host}


class Master:
    """A rosmaster on the loopback interface; `close` ends it.

    Args:
        port: 0 picks a free one.
        log_folder: where ROS writes its logs; None leaves ROS's default (~/.ros/log).

    Raises:
        RosInstallError: ROS 1 is not installed, or the master does not come up.
    """

    def __init__(self, port: int = 0, log_folder: Path | None = None) -> None:
        enable()
        self.port = port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.environment = ros_environment(self.port)
        if log_folder is not None:
            self.environment["ROS_LOG_DIR"] = str(log_folder)
        # rosmaster announces itself under ROS_IP but listens on all interfaces, as every ROS 1 node does.
        self.process = start_child(
            [sys.executable, "-c", _PROGRAM, str(self.port)],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._await()

    def _await(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RosInstallError(
                    f"rosmaster ended at once (exit code {self.process.returncode}); is port {self.port} in use? "
                    f"Its packages: {ros_folder()}"
                )
            if master_pid(self.uri) is not None:
                return
            time.sleep(0.05)
        self.close()
        raise RosInstallError(f"rosmaster did not answer on port {self.port} within {START_SECONDS:.0f} s")

    def close(self) -> None:
        """End the master. May be called twice."""
        end_child(self.process, seconds=5)


class _Transport(xmlrpc.client.Transport):
    """XML-RPC with a time-out: a hung master must not hang the caller."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self._timeout = timeout

    def make_connection(self, host):
        connection = super().make_connection(host)
        connection.timeout = self._timeout
        return connection


def _ask(uri: str, timeout: float, method: str, *arguments: str) -> tuple[int, Any]:
    """The status code and the value that a master, or a node, answers."""
    with xmlrpc.client.ServerProxy(uri, transport=_Transport(timeout)) as server:
        code, _, value = cast(tuple[int, str, Any], getattr(server, method)("/vla_rl", *arguments))
    return code, value


def master_pid(uri: str, timeout: float = 1.0) -> int | None:
    """Process id of the master at `uri`, or None where none answers in time."""
    try:
        code, pid = _ask(uri, timeout, "getPid")
        return int(pid) if code == 1 else None
    except (OSError, *_NO_MASTER):
        return None


def service_uri(uri: str, name: str, timeout: float = 1.0) -> str:
    """Where the service of that name is, as the master at `uri` knows it; "" where it knows none or does not answer."""
    try:
        code, found = _ask(uri, timeout, "lookupService", name)
    except (OSError, *_NO_MASTER):
        return ""
    return str(found) if code == 1 else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def topic_ends(uri: str, timeout: float = 2.0) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, str]]:
    """What the master at `uri` has registered: topic -> publishing nodes, topic -> listening nodes, topic -> type.

    Raises:
        OSError: it does not answer, or not as a master does.
    """
    try:
        _, (publishers, subscribers, _) = _ask(uri, timeout, "getSystemState")
        _, types = _ask(uri, timeout, "getTopicTypes")
        return dict(publishers), dict(subscribers), dict(types)
    except _NO_MASTER as error:
        raise OSError(f"the ROS master at {uri} does not answer as one: {error}") from error


def is_gone(uri: str, node: str, timeout: float = 1.0) -> bool:
    """Whether nobody listens where the master at `uri` says that a node is. One that hangs, or is out of reach, is not.

    Raises nothing: False where the master does not answer.
    """
    try:
        code, address = _ask(uri, timeout, "lookupNode", node)
        if code != 1:
            return True  # It has left in the meantime.
        _ask(str(address), timeout, "getPid")
    except ConnectionRefusedError:
        return True
    except (OSError, *_NO_MASTER):
        return False
    return False
