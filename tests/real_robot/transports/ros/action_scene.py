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
    """Both processes, for one test after the other. `start` starts a Python program: (name, *arguments)."""

    def __init__(
        self, folder: Path, start: Any, robot: str, transport: str, robot_arguments: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.start, self.transport = folder, start, transport
        self._log, self._since = folder / "robot.jsonl", 0
        self.robot: Child = start("robot", str(Path(__file__).with_name(robot)), str(self._log), *robot_arguments)
        self.loop: Child | None = None
        self._num_loops = 0

    def begin(self) -> None:
        """A new test: the joints stand, at zero, and what was before is forgotten. The loop, if one runs, holds."""
        if self.loop is not None and self.loop.process.poll() is None:
            if self.states()[-1]["mode"] == "stopped":
                self.say(reset="the next test")
            self.say(action=None)
            self.awaits("holding")
        now = time.monotonic()
        until(lambda: self.stands(0.2, now), "the joints to stand")
        before = len(self.events("zero"))
        self.robot.type("\n")
        until(lambda: len(self.events("zero")) > before, "the joints at zero")
        self._since = len(json_lines(self._log))

    def serve(self) -> None:
        """Let the robot's servers come up."""
        until(lambda: self.robot.says("up"), "the robot")
        self.robot.type("\n")
        until(lambda: self.robot.says("serving"), "the action servers")

    def run(self, *overrides: str) -> None:
        """Start the loop, unless one runs, and wait until it is up."""
        if self.loop is None or self.loop.process.poll() is not None:
            loop = self.loop = self.start_loop(*overrides)
            until(lambda: loop.says("ready"), "the loop")

    def start_loop(self, *overrides: str) -> Child:
        self._num_loops += 1
        contract, name = str(CONTRACT), f"loop{self._num_loops}"
        log = str(self.folder / f"{name}.jsonl")
        return self.start(name, str(LOOP), contract, log, f"transport={self.transport}", *overrides)

    def say(self, **told: Any) -> None:
        assert self.loop is not None
        self.loop.type(json.dumps(told) + "\n")

    def ask(self, finger: float = 0.0, arm: list[float] | None = None, suction: float = 0.0) -> None:
        """The policy asks that at each tick from now on."""
        self.say(action=[finger, *(arm or ARM), suction])

    def events(self, event: str, **like: Any) -> list[dict[str, Any]]:
        """The robot's log lines of that event with those values."""
        lines = json_lines(self._log)[self._since :]
        return [e for e in lines if e["event"] == event and all(e.get(k) == v for k, v in like.items())]

    def goals(self, server: str) -> list[dict[str, Any]]:
        """Its goals in their order. One that a hold canceled, and that was sent anew after it, is one goal."""
        goals, canceled = list[dict[str, Any]](), False
        for line in json_lines(self._log)[self._since :]:
            if line["event"] == "cancel" and line["server"] == server:
                canceled = True
            elif line["event"] == "goal" and line["server"] == server:
                again = canceled and goals and goals[-1] | {"time": 0.0} == line | {"time": 0.0}
                goals, canceled = goals if again else [*goals, line], False
        return goals

    def states(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / f"loop{self._num_loops}.jsonl")

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

    def stands(self, seconds: float, moment: float, *joints: str) -> bool:
        """Whether these joints, or all, have stood for so long; it is looked at from `moment` on (monotonic)."""
        moved = [e["time"] for e in self.events("moved") if not joints or e["joint"] in joints]
        return time.monotonic() - max([moment, *moved[-1:]]) > seconds

    def last_motion_after(self, moment: float, *joints: str) -> float:
        """Milliseconds from then (monotonic) to these joints' last motion, once they have stood for half a second."""
        until(lambda: self.stands(0.5, moment, *joints), f"{joints} stand", 20)
        last = [self.events("moved", joint=joint)[-1]["time"] for joint in joints]
        return max(0.0, (max(last) - moment) * 1000)
