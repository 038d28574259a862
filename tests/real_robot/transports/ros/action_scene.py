"""A robot with action servers and the control loop, each in a process of its own, and what they wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from processes import Child, json_lines, until

CONTRACT = Path(__file__).with_name("actions.yaml")
LOOP = Path(__file__).with_name("action_loop.py")
ARM = [0.0, 0.0]


class Scene:
    """Both processes. `start` starts a Python program: (name, *arguments)."""

    def __init__(
        self, folder: Path, start: Any, robot: str, transport: str, robot_arguments: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.start, self.transport = folder, start, transport
        log = str(folder / "robot.jsonl")
        self.robot: Child = start("robot", str(Path(__file__).with_name(robot)), log, *robot_arguments)
        self.loop: Child | None = None

    def serve(self) -> None:
        """Let the robot's servers come up."""
        until(lambda: self.robot.says("up"), "the robot")
        self.robot.type("\n")
        until(lambda: self.robot.says("serving"), "the action servers")

    def run(self, *overrides: str) -> None:
        """Start the loop, and wait until it is up."""
        loop = self.loop = self.start_loop(*overrides)
        until(lambda: loop.says("ready"), "the loop")

    def start_loop(self, *overrides: str) -> Child:
        contract, log = str(CONTRACT), str(self.folder / "loop.jsonl")
        return self.start("loop", str(LOOP), contract, log, f"transport={self.transport}", *overrides)

    def say(self, **told: Any) -> None:
        assert self.loop is not None
        self.loop.type(json.dumps(told) + "\n")

    def ask(self, finger: float = 0.0, arm: list[float] | None = None, suction: float = 0.0) -> None:
        """The policy asks that at each tick from now on."""
        self.say(action=[finger, *(arm or ARM), suction])

    def events(self, event: str, **like: Any) -> list[dict[str, Any]]:
        """The robot's log lines of that event with those values."""
        lines = json_lines(self.folder / "robot.jsonl")
        return [e for e in lines if e["event"] == event and all(e.get(k) == v for k, v in like.items())]

    def states(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "loop.jsonl")

    def awaits(self, mode: str, reason: str = "") -> dict[str, Any]:
        """Wait until the loop's state is that. Returns its log line."""

        def found() -> dict[str, Any] | None:
            last = self.states()[-1:]
            return last[0] if last and last[0]["mode"] == mode and reason in last[0]["reason"] else None

        try:
            return until(found, f"{mode} ({reason})", 30)
        except AssertionError as error:
            told = self.loop.output()[-2000:] if self.loop else ""
            raise AssertionError(f"{error}; states: {self.states()[-6:]}; {told}") from None

    def finger(self) -> float:
        moved = self.events("moved", joint="finger")
        return moved[-1]["position"] if moved else 0.0

    def last_motion_after(self, moment: float, joint: str) -> float:
        """Milliseconds from then (monotonic) to the joint's last motion, once it has stood for half a second."""

        def stands() -> bool:
            last = self.events("moved", joint=joint)[-1]["time"]
            return time.monotonic() - max(last, moment) > 0.5

        until(stands, f"{joint} stands", 20)
        return max(0.0, (self.events("moved", joint=joint)[-1]["time"] - moment) * 1000)
