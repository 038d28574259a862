"""A scripted person at one robot's console: takes over from the policy, and drives as the simulator's expert would."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from page_socket import Browser, Served
from sim_observer import SceneObserver

from real_robot.operator.teleop import AXES

FULL = np.array([1, 1, 1, 10, 10, 10])  # m/s and rad/s of hands at full deflection
MOVED = 0.01  # meters


class ExpertAtConsole(Browser):
    """In control of the console; `observer` see a `vla-rl robot sim` with `publish_expert=true`."""

    def __init__(self, served: Served, observer: SceneObserver) -> None:
        super().__init__(served)
        self.observer = observer
        assert self.take_control(force=True)["in_control"]

    def leave(self) -> None:
        """Close the page; another one may take control."""
        self.socket.close()

    def begin(self) -> None:
        """Start an episode, and watch the policy move the robot."""
        self.until(lambda s: s.get("state") and s["phase"] in ("idle", "ended"))
        self.press("start")
        at = self.until(lambda s: s["phase"] == "autonomous" and s["mode"] == "running")["state"][:3]
        self.until(lambda s: np.abs(np.subtract(s["state"][:3], at)).max() > MOVED or s["phase"] == "ended")

    def run_episode(self, helps: bool) -> tuple[bool, bool]:
        """An episode in which the person takes over, or gives up; the robot may say before that it is solved.

        Returns:
            whether the person has driven; success, as the console has said.
        """
        self.begin()
        wanted, driven = "take_over" if helps else "failure", False
        self.press(wanted)

        def is_over(status: dict[str, Any]) -> bool:
            nonlocal driven
            if status["phase"] in ("recovery", "correction"):
                driven = True
                self._drive()
            elif status["phase"] == "paused":  # For another reason, before the button was heeded.
                self.press(wanted)
            return status["phase"] == "ended"

        outcome = self.until(is_over)["outcome"]
        return driven, outcome == "success"

    def _drive(self) -> None:
        sight = self.observer.sight
        if sight.twist is None:
            return
        if not np.isfinite(sight.remaining):
            self.press("failure")
            return
        hands = np.clip(sight.twist / FULL, -1, 1)
        axes = {axis: round(float(value), 5) for axis, value in zip(AXES, hands, strict=True)}
        grip = None if sight.grip == 0 else "open" if sight.grip < 0 else "close"
        self.say("drive", axes=axes, gripper=grip, held=True, sent=time.monotonic())
