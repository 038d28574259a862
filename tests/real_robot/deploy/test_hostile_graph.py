"""Hostile policies of `test_hostile.py` once more over real programs: what reaches the wire of a real ROS 1 graph.

Master, policy server, simulated robot and deploy are processes; a node of its own writes down each command that is
sent. The judge knows the limits alone: its bounds hold for any two commands in a row, whatever the time between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import LIMITS, RATE, Deployment
from processes import Child, json_lines, missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
ACCELERATION = 2.0  # of the command's numbers, which are in [-1, 1]; by 1 / RATE, between two commands
NAMES = ("x", "y", "z", "turn_x", "turn_y", "turn_z")
SCALE = LIMITS  # of the command's numbers in a twist
DIMENSIONS = [
    {"name": name, "kind": "velocity", "low": -1, "high": 1, "max_acceleration": ACCELERATION, "max_jerk": 40}
    for name in NAMES
] + [{"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_step": 1000, "start": 0}]


class Hostile(Deployment):
    """A deployment whose policy turns hostile, and what was sent on the wire."""

    def __init__(self, folder: Path, behavior: str) -> None:
        self.wire = folder / "wire.jsonl"
        super().__init__(folder, behavior, overrides=[f"safety.dimensions={json.dumps(DIMENSIONS)}"])

    def start_sim(self) -> Child:
        recorder = self.graph.start("wire", "tests/real_robot/wire_recorder.py", str(self.wire))
        until(lambda: recorder.says("ready"), "the recorder")
        return super().start_sim()

    def start_server(self) -> Child:
        return self.graph.start("server", "tests/real_robot/hostile_server.py", str(self.port), self.behavior)

    def hostile_since(self) -> float:
        """When the first hostile chunk was made, monotonic seconds."""
        until(lambda: self.graph.check_alive() or self.server.says("hostile"), "the first hostile chunk")
        return float(self.server.output().rpartition("hostile ")[2].split()[0])

    def twists(self) -> list[dict]:
        return [line for line in json_lines(self.wire) if "twist" in line]

    def check_wire(self) -> None:
        """All that was sent is finite, within limits, and not over-accelerated; the workspace may brake harder."""
        sent = np.array([line["twist"] for line in self.twists()]) / SCALE
        assert len(sent) > 30 and np.isfinite(sent).all() and np.abs(sent).max() <= 1 + 1e-6
        before, after = sent[:-1], sent[1:]
        brakes = (before * after >= 0) & (np.abs(after) <= np.abs(before))
        assert (brakes | (np.abs(after - before) <= ACCELERATION / RATE + 1e-6)).all()
        grips = [line["gripper"] for line in json_lines(self.wire) if "gripper" in line]
        assert set(grips) <= {-1.0, 0.0}


@pytest.fixture
def robot(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hostile]:
    deployment = Hostile(tmp_path, request.param)
    try:
        yield deployment
        deployment.check_wire()
    finally:
        deployment.close()


@pytest.mark.parametrize("robot", ["nan", "infinite", "short"], indirect=True)
def test_what_cannot_be_followed_ends_in_a_stop(robot: Hostile, request: pytest.FixtureRequest) -> None:
    since = robot.hostile_since()
    until(lambda: robot.mode() == "stopped", "the stop")
    moving = [line["time"] for line in robot.twists() if np.any(line["twist"])]
    assert moving and not np.any(robot.twists()[-1]["twist"]), "the last word is to stand"
    print(f"{request.node.name}: last motion {(max(moving) - since) * 1000:.0f} ms after the first hostile chunk")


@pytest.mark.parametrize("robot", ["greatest", "alternating", "noise"], indirect=True)
def test_what_goes_beyond_the_limits_is_kept_within_them(robot: Hostile) -> None:
    since = robot.hostile_since()
    until(lambda: sum(line["time"] > since for line in robot.twists()) > 60, "commands after it")
    limited = [line["limited"] for line in json_lines(robot.ticks) if line["time"] > since and line["requested"]]
    assert any(limited), "the limits acted"
