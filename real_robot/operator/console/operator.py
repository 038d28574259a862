"""The console's operator: what a person pressed becomes an `OperatorCommand`, silence a hold.

The console's thread tells it what happened; the control loop asks it at each tick. Nothing here waits.

`ConsoleState` is what the console shows: the newest tick, the failure score over time, and numbers about the loop. The
control loop writes (a reference and some numbers, never waiting), the console's own thread reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from real_robot.contract.channels import StateSource
from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.operator.console.messages import Drive
from real_robot.operator.devices import AxesDevice
from real_robot.operator.episode_log import Comparisons
from real_robot.operator.intervention import Intervention, InterventionError
from real_robot.operator.leader import LeaderFollowing
from real_robot.operator.scene_reset import SceneReset
from real_robot.operator.teleop import Axes, Teleoperation
from real_robot.types import RobotObservation

SCORE_SECONDS = 120.0
MAX_SCORES = 4096
MAX_NOTICES = 32
_DRIVEN = ("recovery", "correction", "demo")
_NO_MOTION = np.zeros(6, np.float32)


@dataclass(frozen=True)
class Notice:
    """One line for the page's log. `number` counts up, so that each console gets each once."""

    number: int
    time: float
    text: str


class ConsoleState:
    """See the module. An observer of ticks: call it with each. `score` takes a failure detector's.

    Args:
        detector: the failure detector's name; empty: there is none.
    """

    def __init__(self, contract: RobotContract, detector: str = "") -> None:
        self.contract, self.detector = contract, detector
        self._lock = threading.Lock()
        self._tick: Tick | None = None
        self._observed: Tick | None = None  # the newest tick with an observation
        self._last_sent: np.ndarray | None = None
        self._starts: deque[float] = deque(maxlen=64)
        self._latency = self._late = 0.0
        self._scores: deque[tuple[int, float, float, float]] = deque(maxlen=MAX_SCORES)
        self._num_scores = self._num_notices = 0
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)

    # --- written by the control loop ----------------------------------------------------------

    def __call__(self, tick: Tick) -> None:
        with self._lock:
            self._tick = tick
            self._starts.append(tick.time)
            self._latency += 0.1 * (tick.latency - self._latency)
            self._late = max(tick.late, 0.95 * self._late)
            if tick.observation is not None:
                self._observed = tick
            if tick.sent is not None and tick.sent.allowed is not None:
                self._last_sent = tick.sent.allowed

    def score(self, value: float, threshold: float) -> None:
        """A failure detector's score now, and the threshold above which it is an alarm. From any thread."""
        if not np.isfinite([value, threshold]).all():
            return
        with self._lock:
            self._num_scores += 1
            self._scores.append((self._num_scores, time.monotonic(), float(value), float(threshold)))

    def notice(self, text: str) -> None:
        """A line for the page's log. From any thread."""
        with self._lock:
            self._num_notices += 1
            self._notices.append(Notice(self._num_notices, time.time(), text[:300]))

    # --- read by the console ------------------------------------------------------------------

    @property
    def last_sent(self) -> np.ndarray | None:
        """float32 (A,), what the robot was told last (in a dry run: would have been)."""
        return self._last_sent

    @property
    def mode(self) -> str:
        """What the supervisor did at the newest tick: running, holding or stopped; "" while it was not asked."""
        tick = self._tick
        return "" if tick is None or tick.sent is None else tick.sent.mode

    @property
    def tick_age(self) -> float:
        """Seconds since the control loop was last seen; infinite before its first tick."""
        tick = self._tick
        return float("inf") if tick is None else time.monotonic() - tick.time

    def pictures(self) -> tuple[float, dict[str, np.ndarray]]:
        """(stamp, camera name -> uint8 (height, width, 3) RGB) of the newest observation."""
        tick = self._observed
        if tick is None or tick.observation is None:
            return float("-inf"), {}
        return tick.observation.stamp, tick.observation.images

    def scores(self, after: int) -> list[tuple[int, float, float, float]]:
        """(number, seconds before now, score, threshold) of those after that number."""
        now = time.monotonic()
        with self._lock:
            return [(n, now - t, v, limit) for n, t, v, limit in self._scores if n > after and now - t < SCORE_SECONDS]

    def notices(self, after: int) -> list[Notice]:
        with self._lock:
            return [n for n in self._notices if n.number > after]

    def facts(self) -> dict[str, Any]:
        """What stays: the robot's name, its numbers and their limits."""
        contract = self.contract
        return {
            "robot": contract.name,
            "rate": contract.rate,
            "dry_run": contract.safety.dry_run,
            "detector": self.detector,
            "cameras": list(contract.observation.images),
            "command": [
                {"name": d.name, "low": d.low, "high": d.high, "kind": d.kind} for d in contract.safety.dimensions
            ],
            "state": _state_facts(contract),
        }

    def numbers(self) -> dict[str, Any]:
        """What changes: the newest tick as plain numbers."""
        with self._lock:
            tick, observed, starts = self._tick, self._observed, list(self._starts)
            latency, late = self._latency, self._late
        if tick is None:
            return {}
        sent, observation = tick.sent, observed.observation if observed else None
        span = starts[-1] - starts[0]
        return {
            "step": tick.step,
            "state": _plain(observation.state) if observation else [],
            "instruction": observation.instruction if observation else "",
            "requested": _plain(tick.requested.values) if tick.requested is not None else [],
            "source": tick.requested.source if tick.requested is not None else "none",
            "sent": _plain(sent.allowed) if sent is not None and sent.allowed is not None else [],
            "limited": list(sent.limited) if sent is not None else [],
            "latency_ms": round(latency * 1000, 2),
            "late_ms": round(late * 1000, 2),
            "loop_hz": round((len(starts) - 1) / span, 2) if span > 0 else 0.0,
            "observation_ms": round((time.monotonic() - observation.stamp) * 1000) if observation else None,
        }


def _state_facts(contract: RobotContract) -> list[dict[str, Any]]:
    """Name, and limits where there are some, of each number of the state."""
    names = [name for source in contract.observation.state for name in _names(source)]
    limits: dict[int, tuple[float, float]] = {}
    for dimension in contract.safety.dimensions:
        if dimension.state is not None:
            limits[dimension.state] = (dimension.low, dimension.high)
    if box := contract.safety.workspace:
        limits |= {i: (low, high) for i, low, high in zip(box.state, box.low, box.high, strict=True)}
    return [
        {"name": name, "low": limits.get(i, (None, None))[0], "high": limits.get(i, (None, None))[1]}
        for i, name in enumerate(names)
    ]


def _names(source: StateSource) -> list[str]:
    if source.joints:
        return list(source.joints)
    if source.type == "geometry_msgs/PoseStamped":
        parts = {"position": "x y z", "quaternion": "qx qy qz qw", "axis_angle": "turn_x turn_y turn_z"}
        return [name for part in source.parts for name in parts[part].split()]
    topic = source.topic.rpartition("/")[2]
    return [topic] if source.num_values == 1 else [f"{topic} {i}" for i in range(source.num_values)]


def _plain(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN."""
    flat = np.asarray(values, np.float64).ravel()[:256]
    return [round(float(v), 5) if np.isfinite(v) else None for v in flat]


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
