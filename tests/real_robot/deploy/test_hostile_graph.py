"""Hostile policies of `test_hostile.py` once more over real programs: what reaches the wire of ROS 1 and of ROS 2.

Policy server, simulated robot and deploy are processes; a node of its own writes down each command that is sent. One
deployment of each graph meets them all. The judge knows the limits alone. Between two commands in a row it allows a
tick's change, or that of the time between their receipts: of two ticks in quick succession ROS 1 loses a command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import LIMITS, RATE, Deployment, on_both_graphs, report
from processes import Child, json_lines, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
ACCELERATION = 2.0  # of the command's numbers, which are in [-1, 1], a second
NAMES = ("x", "y", "z", "turn_x", "turn_y", "turn_z")
SCALE = LIMITS  # of the command's numbers in a twist
DIMENSIONS = [
    {"name": name, "kind": "velocity", "low": -1, "high": 1, "max_acceleration": ACCELERATION, "max_jerk": 40}
    for name in NAMES
] + [{"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_step": 1000, "start": 0}]


class Hostile(Deployment):
    """A deployment whose policy turns hostile, and what was sent on the wire."""

    def __init__(self, folder: Path, graph: str) -> None:
        self.wire = folder / "wire.jsonl"
        out_of_view = "safety.checks.frozen_after=1000"  # the arm is driven to the corners, where no camera sees it
        overrides = [f"safety.dimensions={json.dumps(DIMENSIONS)}", out_of_view]
        super().__init__(folder, overrides=overrides, graph=graph)

    def start_sim(self) -> Child:
        recorder = self.graph.node("record", str(self.wire))
        until(lambda: recorder.says("ready"), "the recorder")
        return super().start_sim()

    def start_server(self) -> Child:
        return self.graph.start("server", "tests/real_robot/hostile_server.py", str(self.port))

    def turn(self, behavior: str) -> float:
        """Tell the policy. Returns when its first such chunk was made, monotonic seconds."""
        self.server.type(f"{behavior}\n")
        until(lambda: self.graph.check_alive() or self.told()[-1][0] == behavior, f"the first chunk: {behavior}")
        return float(self.told()[-1][1])

    def told(self) -> list[tuple[str, str]]:
        """The behaviors of its chunks so far, and when each began."""
        return [("good", "0"), *re.findall(r"^(\w+) ([\d.]+)$", self.server.output(), re.MULTILINE)]

    def twists(self) -> list[dict]:
        return [line for line in json_lines(self.wire) if "twist" in line]

    def check_wire(self) -> None:
        """All that was sent is finite, within limits, and not over-accelerated; the workspace may brake harder."""
        lines = self.twists()
        sent = np.array([line["twist"] for line in lines]) / SCALE
        seconds = np.maximum(1 / RATE, np.diff([line["time"] for line in lines]))[:, None]
        assert len(sent) > 30 and np.isfinite(sent).all() and np.abs(sent).max() <= 1 + 1e-6
        before, after = sent[:-1], sent[1:]
        brakes = (before * after >= 0) & (np.abs(after) <= np.abs(before))
        assert (brakes | (np.abs(after - before) <= ACCELERATION * seconds + 1e-6)).all()
        grips = [line["gripper"] for line in json_lines(self.wire) if "gripper" in line]
        assert set(grips) <= {-1.0, 0.0}


session = on_both_graphs(Hostile)


@pytest.fixture
def robot(session: Hostile) -> Iterator[Hostile]:
    """It follows a good policy before."""
    session.await_ticks()
    session.reset()  # where a trial that failed has left a stop
    yield session
    session.check_wire()


def test_what_cannot_be_followed_ends_in_a_stop(robot: Hostile) -> None:
    for behavior in ("nan", "infinite", "short"):
        since = robot.turn(behavior)
        until(lambda: robot.mode() == "stopped", "the stop")
        moving = [line["time"] for line in robot.twists() if np.any(line["twist"])]
        assert moving and not np.any(robot.twists()[-1]["twist"]), "the last word is to stand"
        report(max(moving) - since)
        robot.server.type("good\n")
        robot.reset()


def test_what_goes_beyond_the_limits_is_kept_within_them(robot: Hostile) -> None:
    for behavior in ("greatest", "alternating", "noise"):
        since = robot.turn(behavior)
        until(lambda since=since: sum(line["time"] > since for line in robot.twists()) > 40, "commands after it")
        limited = [line["limited"] for line in json_lines(robot.ticks) if line["time"] > since and line["requested"]]
        assert any(limited), "the limits acted"
    robot.turn("good")
