"""Real processes for the robot's tests: each in a group of its own, all of them ended with the test."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from real_robot.transports.ros.install import RosInstallError, enable
from real_robot.transports.ros.master import Master

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = """<CycloneDDS><Domain><General><Interfaces><NetworkInterface name="lo"/></Interfaces>
<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>
<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""
PATIENCE = 90.0  # seconds that anything may take to start on a busy machine


def missing_ros() -> str:
    """Why ROS 1 cannot run here, or "" where it can."""
    try:
        enable()
    except RosInstallError as error:
        return str(error)
    return ""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for a condition, looking 20 times a second. Returns its value.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def _prepare() -> None:
    """Ctrl-C and SIGHUP count, also in the background and under nohup. Linux: no process outlives the test run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Child:
    """A process, its output in a file, its keyboard a pipe."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str], cwd: Path = ROOT) -> None:
        self.log, self._heard = log, 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_prepare,  # noqa: PLW1509 (it makes two system calls)
            )

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def type(self, keys: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(keys.encode())
        self.process.stdin.flush()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def listen(self) -> None:
        """What it has said by now counts no more in `says`."""
        self._heard = len(self.output())

    def says(self, text: str) -> bool:
        ended, said = self.process.poll(), self.output()[self._heard :]
        if ended is not None and text not in said:
            raise AssertionError(f"the process ended ({ended}) before {text!r}:\n{said[-3000:]}")
        return text in said

    def said_at(self, word: str) -> float:
        """Wait for a line of a word and a moment. Returns the moment, monotonic seconds."""
        line = re.compile(rf"^{word} (\S+)$", re.MULTILINE)
        return float(until(lambda: self.says(word) and line.search(self.output()), word)[1])

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait(60)

    def end(self, seconds: float = 20.0) -> int:
        """Ask it to end (SIGTERM). Returns its exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(seconds)


ROS2_PYTHON = Path(os.environ.get("ROS2_PYTHON") or Path(sys.prefix) / "ros2" / "bin" / "python")


def missing_ros2(package: str = "control_msgs") -> str:
    """Why ROS 2, or that package in its environment, cannot run here; "" where it can."""
    inside = ROS2_PYTHON.parents[1]
    there = list(inside.glob(f"lib/python*/site-packages/{package}"))
    return "" if there else f"no ROS 2 with {package} in {inside}: make setup-dev"


class RosGraph:
    """A ROS master, and the processes around it.

    Attributes:
        transport: an override of a contract, for this graph. sim: options of `vla-rl robot sim`, for a node of it.
    """

    kind, python, domain = "ros1", sys.executable, ""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, list[Child]()
        self.master = Master()
        self.transport = f"transport={{kind: ros1, master: '{self.master.uri}'}}"
        self.sim = ["--master", self.master.uri]

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join(p for p in (str(ROOT), self.master.environment.get("PYTHONPATH", "")) if p)
        return {**self.master.environment, **self._common, "PYTHONPATH": path}

    @property
    def _common(self) -> dict[str, str]:
        return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "ROBOT_GRAPH": self.kind}

    def start(self, name: str, *command: str) -> Child:
        """Start a Python program (module or file, and arguments)."""
        child = Child([self.python, *command], self.folder / f"{name}.log", self.env)
        self.children.append(child)
        return child

    def cli(self, name: str, *arguments: str) -> Child:
        return self.start(name, "-m", "vla_rl", *arguments)

    def end(self, child: Child) -> None:
        """Kill a process of the graph, which is no fault."""
        self.children.remove(child)
        child.kill()

    def node(self, role: str, *arguments: str) -> Child:
        """Start a node of graph_node.py."""
        return self.start(role, "tests/real_robot/graph_node.py", role, *arguments)

    def check_alive(self) -> None:
        """
        Raises:
            AssertionError: a process has ended by itself with an error.
        """
        for child in self.children:
            code = child.process.poll()
            assert code is None or code <= 0, f"{child.log.name}: exit code {code}:\n{child.output()[-3000:]}"

    def restart_master(self) -> None:
        self.master = Master(port=self.master.port)

    def close(self) -> None:
        try:
            for child in self.children:
                child.kill()
        finally:
            self.close_graph()

    def close_graph(self) -> None:
        self.master.close()


class Ros2Graph(RosGraph):
    """A domain of ROS 2 of its own, on this machine alone; its programs run in ROS 2's environment."""

    kind, python = "rclpy", str(ROS2_PYTHON)

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, []
        self.domain = str(1 + (os.getpid() + time.time_ns()) % 100)
        self.transport, self.sim = "transport={kind: rclpy}", ["graph=rclpy"]

    @property
    def env(self) -> dict[str, str]:
        own = {"ROS_DOMAIN_ID": self.domain, "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
        own["FASTDDS_BUILTIN_TRANSPORTS"] = "UDPv4"  # as between machines; killed processes leave their shared memory
        return {**os.environ, **own, **self._common}

    def close_graph(self) -> None: ...


class DdsGraph(Ros2Graph):
    """A domain of DDS, for programs that speak ROS 2's wire by cyclonedds."""

    kind, python = "ros2", sys.executable

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.transport = f"transport={{kind: ros2, domain: {self.domain}}}"

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "CYCLONEDDS_URI": LOOPBACK}


_GRAPHS = {graph.kind: graph for graph in (RosGraph, Ros2Graph, DdsGraph)}


def open_graph(kind: str, folder: Path) -> RosGraph:
    """That graph, of the test's own; skips the test where it cannot be had."""
    if kind == "ros2":
        pytest.importorskip("cyclonedds", reason="cyclonedds is not installed: pip install '.[ros]'")
    elif reason := missing_ros() if kind == "ros1" else missing_ros2():
        pytest.skip(reason)
    return _GRAPHS[kind](folder)


# A trial on both graphs: ROS 2's is in the fast suite, ROS 1's among the slow tests.
BOTH_GRAPHS = [pytest.param("ros1", marks=pytest.mark.slow), "rclpy"]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is still being written; each must be JSON."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
