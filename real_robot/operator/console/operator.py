"""The console's operator: what a person pressed becomes an `OperatorCommand`, silence a hold.

The console's thread tells it what happened; the control loop asks it at each tick. Nothing here waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from real_robot.control.robot_loop import OperatorCommand
from real_robot.operator.console.console_state import ConsoleState
from real_robot.operator.console.messages import Drive
from real_robot.operator.devices import AxesDevice
from real_robot.operator.episode_log import Comparisons
from real_robot.operator.intervention import Intervention, InterventionError
from real_robot.operator.leader import LeaderFollowing
from real_robot.operator.scene_reset import SceneReset
from real_robot.operator.teleop import Axes, Teleoperation
from real_robot.types import RobotObservation

_DRIVEN = ("recovery", "correction", "demo")
_NO_MOTION = np.zeros(6, np.float32)


class ConsoleOperator:
    """An operator of the loop. List it before the `Intervention` that it commands, which is another.

    Dead-man: a person's command is followed for `Teleoperation.config.timeout` after the page last said that
    something is held. A console in control that falls silent for `link_timeout` pauses the policy.

    Args:
        link_timeout: seconds.
        device, leader: a person's device at the robot's computer; heeded only while a console is in control.

    Attributes:
        scene: who lays the scene out, for the button New scene; None where nobody does.
        comparisons: who keeps what is better, for the buttons Better and Worse; None where nothing is recorded.
    """

    scene: SceneReset | None = None
    comparisons: Comparisons | None = None

    def __init__(
        self,
        intervention: Intervention,
        teleoperation: Teleoperation,
        console_state: ConsoleState,
        link_timeout: float = 1.0,
        device: AxesDevice | None = None,
        leader: LeaderFollowing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.intervention, self.teleoperation, self.console_state = intervention, teleoperation, console_state
        self._link_timeout, self._device, self._clock = link_timeout, device, clock
        self._leader = leader
        self._device_moved = False  # at the last look
        self._lock = threading.Lock()
        self._stop: str | None = None
        self._reset: str | None = None
        self._axes: tuple[Axes, float] | None = None
        self._seen: float | None = None  # when the console in control was last heard; None: there is none
        self._actions = {
            "start": intervention.begin,
            "hold": intervention.pause,
            "resume": intervention.resume,
            "take_over": intervention.take_over,
            "rewind": intervention.rewind,
            "recovery_done": intervention.recovery_done,
            "correction_done": intervention.correction_done,
            "success": intervention.success,
            "failure": intervention.failure,
            "demonstrate": intervention.demonstrate,
            "new_scene": self._new_scene,
            "better": partial(self._compare, True),
            "worse": partial(self._compare, False),
        }

    # --- told by the console's thread ---------------------------------------------------------

    def press(self, button: str, who: str) -> None:
        """
        Raises:
            InterventionError: not possible now; the message says what is.
        """
        self._actions[button](who)

    def allowed(self) -> list[str]:
        """The buttons that are possible now."""
        events = self.intervention.allowed()
        names = {"begin": "start", "pause": "hold"}
        buttons = [name for event in events if (name := names.get(event, event)) in self._actions]
        if "start" in buttons and self.scene is not None and self.scene.can_reset:
            buttons.append("new_scene")
        if self.comparisons is not None and self.comparisons.can_compare:
            buttons += ["better", "worse"]
        return buttons

    def _compare(self, better: bool, who: str) -> None:
        if self.comparisons is None:
            raise InterventionError("better, worse: nothing is recorded; deploy with --record FOLDER")
        self.comparisons.compare(better, who)
        self.console_state.notice(f"{'better' if better else 'worse'} than the episode before ({who})")

    def _new_scene(self, who: str) -> None:
        if self.scene is None:
            raise InterventionError("new scene: the robot's contract names no episode.reset; lay it out by hand")
        if "begin" not in self.intervention.allowed():
            raise InterventionError(f"new scene: not possible while {self.intervention.state}; end the episode first")
        self.scene.reset(who)

    def drive(self, drive: Drive) -> None:
        """The person's hands, just now."""
        axes = drive.axes if drive.held else None
        with self._lock:
            self._axes = None if axes is None else (axes, self._clock())
        if axes is None:
            self._rest()

    def stop(self, who: str) -> None:
        """Emergency stop at the next tick."""
        self._stop = f"console: {who}"
        self.let_go()

    def reset(self, who: str) -> None:
        """Motion is allowed again after a stop."""
        self._reset = who

    def let_go(self) -> None:
        """Nothing is held any more."""
        with self._lock:
            self._axes = None
        self._rest()

    def controller_seen(self) -> None:
        """The console in control has just been heard."""
        self._seen = self._clock()

    def controller_gone(self, why: str) -> None:
        """No console is in control now: the robot holds."""
        with self._lock:
            was_there, self._seen, self._axes = self._seen is not None, None, None
        self._rest()
        if was_there:
            self._pause(why)

    @property
    def controller_silence(self) -> float:
        """Seconds since the console in control was heard; infinite where there is none."""
        seen = self._seen
        return float("inf") if seen is None else self._clock() - seen

    # --- asked by the control loop ------------------------------------------------------------

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """Stop and reset; what the person's hands do goes to the intervention."""
        if self._seen is not None and self.controller_silence > self._link_timeout:
            self.controller_gone("the console is silent")
        now = self._clock()
        with self._lock:
            held = self._axes
        watched = self._seen is not None  # Without a console in control, nobody could press stop.
        if held is None:
            axes = self._device.read() if watched and self._device is not None else None
            held = None if axes is None else (axes, now)
            if axes is None and self._device_moved:
                self._rest()
            self._device_moved = axes is not None
        if self._leader is not None:
            drives = watched and held is None and self.intervention.control_source in _DRIVEN
            if (target := self._leader.step(drives, self.console_state.last_sent, self.console_state.mode)) is not None:
                self.intervention.give(*target)
        if held is not None and now - held[1] <= self.teleoperation.config.timeout:
            self.intervention.give(self.teleoperation.command(held[0], self.console_state.last_sent), held[1])
        stop, self._stop = self._stop, None
        reset, self._reset = self._reset, None
        return OperatorCommand(stop=stop, reset=None if stop else reset)

    def _rest(self) -> None:
        """A command that moves nothing, in place of the last one, which would be followed until its time-out."""
        if self.intervention.control_source in _DRIVEN and self.console_state.last_sent is not None:
            rest = Axes(_NO_MOTION.copy())
            self.intervention.give(self.teleoperation.command(rest, self.console_state.last_sent))

    def _pause(self, why: str) -> None:
        self.console_state.notice(f"{why}: the robot holds")
        if self.intervention.state in ("autonomous", "rewinding"):
            with suppress(InterventionError):  # A sensor, say, has just ended the episode: the loop must not end of it.
                self.intervention.pause("console", why)
