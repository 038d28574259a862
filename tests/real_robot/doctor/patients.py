"""Graphs for the doctor to look at: a played robot on a ROS 1 master, or on a DDS domain of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import PATIENCE, ROOT, Child, RosGraph, until

PLAYER = str(ROOT / "tests/real_robot/played_robot.py")
LOOPBACK = """<CycloneDDS><Domain><General><Interfaces><NetworkInterface name="lo"/></Interfaces>
<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>
<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""
Report = tuple[int, dict[str, dict[str, str]]]


def doctor(contract: str, env: dict[str, str], *arguments: str) -> Report:
    """The exit code, and the report's lines by name, without those that are well."""
    command = [sys.executable, "-m", "vla_rl.cli", "doctor", contract, *arguments, "--json", "--seconds", "2"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, {c["name"]: c for c in json.loads(done.stdout)["checks"] if c["status"] != "ok"}


def examined_until(expected: Callable[[Report], bool], attempts: int = 4) -> Callable[..., Report]:
    """A look taken again, up to so often, until the report is as expected, since a busy machine makes gaps."""

    def look(contract: str, env: dict[str, str], *arguments: str) -> Report:
        for _ in range(attempts):
            if expected(report := doctor(contract, env, *arguments)):
                break
        return report

    return look


well = examined_until(lambda report: report[0] == 0)


class Ros1Patient:
    """A robot on a ROS master."""

    def __init__(self, folder: Path) -> None:
        self.graph = RosGraph(folder)

    def examine(self, contract: str, graph: dict[str, Any], look: Callable[..., Report] = doctor) -> Report:
        player = self.graph.start("player", PLAYER, json.dumps({"kind": "ros1"}), json.dumps(graph))
        until(lambda: player.says("ready"), "the player")
        report = look(contract, self.graph.env, f"transport.master={self.graph.master.uri}")
        self.graph.check_alive()
        assert "commanded" not in player.output(), "the doctor sent a command"
        return report

    def close(self) -> None:
        self.graph.close()


class DdsPatient:
    """A robot on a DDS domain."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.domain = folder, 1 + time.time_ns() % 200
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, "CYCLONEDDS_URI": LOOPBACK, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.child: Child | None = None

    def examine(self, contract: str, graph: dict[str, Any], look: Callable[..., Report] = doctor) -> Report:
        transport = {"kind": "ros2", "domain": self.domain}
        command = [sys.executable, PLAYER, json.dumps(transport), json.dumps(graph)]
        player = self.child = Child(command, self.folder / "player.log", self.env)
        until(lambda: player.says("ready"), "the player")
        report = look(contract, self.env, f"transport.domain={self.domain}")
        assert player.process.poll() is None, player.output()
        assert "commanded" not in player.output(), "the doctor sent a command"
        return report

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
