"""Graphs for the doctor to look at: a played robot in memory, on a ROS 1 master, or on a DDS domain of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_transport import MemoryTransport
from played_robot import Stream
from processes import LOOPBACK, PATIENCE, ROOT, ROS2_PYTHON, Child, RosGraph, until
from virtual_time import VirtualTime

from real_robot.contract.load import load_contract
from real_robot.doctor.listen import listen
from real_robot.doctor.robot_check import check_robot, judge
from real_robot.transports.base import Endpoint, Handler, Publisher, QosConfig
from real_robot.transports.messages import Message
from vla_rl.common.tables import Check

PLAYER = str(ROOT / "tests/real_robot/played_robot.py")
SECONDS = 1.0  # that are listened
Report = dict[str, Check]  # the report's lines by name, without those that are well
Look = Callable[[], Report]


def report_of(checks: list[Check]) -> Report:
    return {check.name: check for check in checks if check.status != "ok"}


def taken_until(expected: Callable[[Report], bool], look: Look, attempts: int = 4) -> Report:
    """A look taken again, up to so often, until the report is as expected, since a busy machine makes gaps."""
    for _ in range(attempts):
        if expected(report := look()):
            break
    return report


# --- in memory -----------------------------------------------------------------------------------


class PlayedGraph(MemoryTransport):
    """A graph whose other node is a played robot. As everywhere, a message is heard by readers of its type, and one of
    a best-effort publisher by none that is reliable."""

    def __init__(self, graph: dict[str, Any], is_ros1: bool) -> None:
        super().__init__()
        self._is_ros1 = is_ros1
        self._readers: list[tuple[str, type[Message], QosConfig, Handler]] = []
        self._ends = [self._end(entry["topic"], entry["type"], False) for entry in graph["listen"]]
        self._ends += [self._end(entry["topic"], entry["type"], True) for entry in graph.get("advertise", ())]
        self._ends += [self._server(entry["name"], entry["type"]) for entry in graph.get("actions", ())]
        self.streams = [Stream(self, entry) for entry in graph["publish"]]

    def _end(self, topic: str, kind: str, publishes: bool, reliability: str = "reliable") -> Endpoint:
        return Endpoint(topic, kind, "/player", publishes, "" if self._is_ros1 else reliability)

    def _server(self, name: str, kind: str) -> Endpoint:
        package, _, short = kind.partition("/")
        if self._is_ros1:
            return self._end(f"{name}/goal", f"{kind}ActionGoal", False)
        request = f"{package}::action::dds_::{short}_SendGoal_Request"
        return self._end(f"rq{name}/_action/send_goalRequest", request, False)

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        self._readers.append((topic, message_type, qos, handler))

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        self._ends.append(self._end(topic, message_type.TYPE, True, qos.reliability))

        def publish(message: Message) -> None:
            for heard, kind, wanted, handler in self._readers:
                is_heard = self._is_ros1 or qos.reliability == "reliable" or wanted.reliability == "best_effort"
                if heard == topic and kind is message_type and is_heard:
                    handler(message)

        return publish

    def survey(self) -> list[Endpoint]:
        return self._ends


def examine(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, contract: str, graph: dict[str, Any]) -> Report:
    """What the doctor finds where a robot plays that graph in memory, in virtual time."""
    virtual.install(monkeypatch, "real_robot", "played_robot")
    loaded = load_contract(contract)
    transport = PlayedGraph(graph, loaded.transport.kind == "ros1")

    def play() -> None:
        while True:
            for stream in transport.streams:
                stream.step()
            virtual.sleep(0.002)

    virtual.Thread(play).start()
    return report_of(judge(loaded, listen(loaded, transport, SECONDS)))


# --- on a graph -------------------------------------------------------------------------------------


class Ros1Patient:
    """Robots on a ROS master, one after the other. The doctor is a program of its own: rospy has one node a process."""

    def __init__(self, folder: Path) -> None:
        self.graph = RosGraph(folder)

    def examine(self, contract: str, graph: dict[str, Any], expected: Callable[[Report], bool]) -> Report:
        player = self.graph.start("player", PLAYER, json.dumps({"kind": "ros1"}), json.dumps(graph))
        until(lambda: player.says("ready"), "the player")
        report = taken_until(expected, lambda: self._doctor(contract))
        self.graph.check_alive()
        leave(player)
        return report

    def _doctor(self, contract: str) -> Report:
        master = f"transport.master={self.graph.master.uri}"
        command = [sys.executable, "-m", "vla_rl", "doctor", contract, master, "--json", "--seconds", f"{SECONDS}"]
        done = subprocess.run(
            command, cwd=ROOT, env=self.graph.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.stdout, done.stderr[-3000:]
        checks = [Check(**check) for check in json.loads(done.stdout)["checks"]]
        assert done.returncode == int(any(check.is_fault for check in checks))
        return report_of(checks)

    def close(self) -> None:
        self.graph.close()


class DdsPatient:
    """Robots on DDS domains of their own."""

    python, kind = sys.executable, "ros2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
        self.env = {**os.environ, **own, "CYCLONEDDS_URI": LOOPBACK, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.child: Child | None = None

    def play(self, graph: dict[str, Any], domain: int) -> Child:
        transport = {"kind": self.kind, **({"domain": domain} if self.kind == "ros2" else {})}
        command = [self.python, PLAYER, json.dumps(transport), json.dumps(graph)]
        env = {**self.env, "ROS_DOMAIN_ID": str(domain)}
        player = self.child = Child(command, self.folder / f"player{domain}.log", env)
        until(lambda: player.says("ready"), "the player")
        return player

    def examine(self, contract: str, graph: dict[str, Any], expected: Callable[[Report], bool]) -> Report:
        domain = 1 + time.time_ns() % 200
        player = self.play(graph, domain)
        loaded = load_contract(contract, [f"transport.domain={domain}"])
        report = taken_until(expected, lambda: report_of(check_robot(loaded, SECONDS)))
        leave(player)
        return report

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()


class FastDdsPatient(DdsPatient):
    """Nodes of ROS 2 on rmw_fastrtps, played by Jazzy's rclpy; the doctor hears them over cyclonedds."""

    python, kind = str(ROS2_PYTHON), "rclpy"


def leave(player: Child) -> None:
    """End a player, which unregisters what it was; it has been sent no command."""
    assert player.process.poll() is None and "commanded" not in player.output(), player.output()
    assert player.process.stdin is not None
    player.process.stdin.close()
    assert player.process.wait(PATIENCE) == 0
