"""What both robots with action servers share: joints that move at a speed, and a log of all that happens to them.

A log line is {"time": monotonic seconds, "event": ..., ...}; "moved" lines are written at each step of a motion.
A gripper's goal says what becomes of it: see `outcome`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

JOINTS = ("finger", "a", "b")
PERIOD = 0.02
SPEED = {"finger": 0.08, "a": 1.0, "b": 1.0}  # m/s, rad/s


def outcome(position: float) -> str:
    """What the gripper's server does with a goal."""
    return {-1.0: "reject", -2.0: "abort", -3.0: "stall", -4.0: "cancel", -5.0: "ignore"}.get(position, "move")


class Joints:
    """The arm's and the gripper's joints, and their log."""

    def __init__(self, log: Path) -> None:
        self._file = log.open("a", buffering=1)
        self._lock = threading.Lock()
        self.positions = dict.fromkeys(JOINTS, 0.0)

    def tell(self, event: str, **values: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"time": time.monotonic(), "event": event, **values}) + "\n")

    def obey(self, lines: Iterable[str]) -> None:
        """At each line, have all joints at zero at once."""
        for _ in lines:
            self.positions = dict.fromkeys(JOINTS, 0.0)
            self.tell("zero")

    def step(self, targets: dict[str, float]) -> bool:
        """Move towards the targets for one period, and wait for it. Returns whether all are reached."""
        for joint, target in targets.items():
            way = target - self.positions[joint]
            if way:
                step = SPEED[joint] * PERIOD
                self.positions[joint] = target if abs(way) <= step else self.positions[joint] + math.copysign(step, way)
                self.tell("moved", joint=joint, position=round(self.positions[joint], 5))
        time.sleep(PERIOD)
        return all(self.positions[joint] == target for joint, target in targets.items())
