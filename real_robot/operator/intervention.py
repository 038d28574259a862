"""Intervention state machine: who is in control of the robot, and what it does at this tick (RaC, arXiv 2509.07953).

    idle -> autonomous -> paused -> recovery -> correction -> ended
                            |  ^        ^            |
                            v  |        +------------+ (take over again)
                          rewinding

The policy runs until an alarm or a person pauses it; the robot then holds. It may rewind along the path that it
executed. The person drives it back to where the policy knows its way (recovery), then completes the sub-task
(correction), and the episode ends: after a person has driven, control never returns to the policy in that
episode (RaC's rule 2), so no recorded state comes from a mixture of the two.

An `Intervention` is the loop's operator (`poll`) and one of its observers (call it with each tick). A console calls
the methods named after its buttons, from any thread; a failure detector calls `alarm` and `all_clear`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import RUNNING, STOPPED
from real_robot.types import Command, RobotObservation

InterventionState = Literal["idle", "autonomous", "paused", "rewinding", "recovery", "correction", "demo", "ended"]
Outcome = Literal["success", "failure"]
Kind = Literal["position", "velocity"]

RUNNING_STATES: tuple[InterventionState, ...] = (
    "autonomous", "paused", "rewinding", "recovery", "correction", "demo",
)  # fmt: skip
_DRIVEN: tuple[InterventionState, ...] = ("recovery", "correction", "demo")

# Event -> the states in which it may happen, and the state that follows.
TRANSITIONS: dict[str, tuple[tuple[InterventionState, ...], InterventionState]] = {
    "begin": (("idle", "ended"), "autonomous"),
    "demonstrate": (("idle", "ended"), "demo"),
    "alarm": (("autonomous",), "paused"),
    "pause": (("autonomous", "rewinding"), "paused"),
    "all_clear": (("rewinding",), "paused"),
    "rewind": (("autonomous", "paused"), "rewinding"),
    "resume": (("paused",), "autonomous"),
    "take_over": (("autonomous", "paused", "rewinding", "correction"), "recovery"),
    "recovery_done": (("recovery",), "correction"),
    "correction_done": (("correction",), "ended"),
    "success": (RUNNING_STATES, "ended"),
    "failure": (RUNNING_STATES, "ended"),
}


class InterventionError(ValueError):
    """Something was asked that the present state does not allow; the message says what is allowed."""


@dataclass(frozen=True)
class Transition:
    """One change of state.

    Attributes:
        time: seconds on the robot process's monotonic clock. event: what happened, a key of `TRANSITIONS`.
        who: the person, detector or supervisor that made it. reason: why, where it was said.
        before, after: the states.
    """

    time: float
    event: str
    who: str
    before: InterventionState
    after: InterventionState
    reason: str = ""


@dataclass(frozen=True)
class EpisodeSummary:
    """What is known of the present (or last) episode, for the recording and the console.

    Attributes:
        outcome: None until somebody has said. interventions: times that a person took over from the policy (0 or 1).
        recoveries: recovery segments in which the robot moved, those after a failed correction included.
        alarms: of the detector. rewound: steps driven backwards.
        number: of the episode, counted from 1; 0 where nobody counts.
    """

    outcome: Outcome | None
    interventions: int
    recoveries: int
    alarms: int
    rewound: int
    transitions: tuple[Transition, ...]
    number: int = 0

    @property
    def intervened(self) -> bool:
        """The policy did not do it alone: a person drove, or the robot was rewound."""
        return self.interventions > 0 or self.rewound > 0


class Intervention:
    """See the module.

    Args:
        kinds: of each number of a command: "position" (a set-point, or a gripper command) or "velocity" (a speed, or
            a change per step), as in the contract's safety.dimensions. Rewinding sends earlier set-points again, and
            speeds with the opposite sign.
        clock: monotonic seconds, the loop's.
        command_timeout: seconds after which a person's command is no longer followed: the robot holds.
        max_rewind: steps, the most that one `rewind` drives back.
        on_transition: called with each `Transition`, in the caller's thread, after the change.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        clock: Callable[[], float] = time.monotonic,
        command_timeout: float = 0.25,
        max_rewind: int = 10_000,
        on_transition: Callable[[Transition], None] | None = None,
    ) -> None:
        if wrong := sorted(set(kinds) - {"position", "velocity"}):
            raise ValueError(f"kinds: {wrong[0]!r}; allowed: position, velocity")
        if not kinds or command_timeout <= 0 or max_rewind < 1:
            raise ValueError("kinds must not be empty; command_timeout and max_rewind must be positive")
        self._sign = np.array([-1.0 if kind == "velocity" else 1.0 for kind in kinds], np.float32)
        self._clock, self._timeout, self._max_rewind = clock, command_timeout, max_rewind
        self._on_transition = on_transition
        self._lock = threading.RLock()
        self._state: InterventionState = "idle"
        self._given: tuple[np.ndarray, float] | None = None
        self._must_begin = self._must_replan = False
        self._number = 0
        self._before: EpisodeSummary | None = None
        self._clear()

    def _clear(self) -> None:
        self._path: list[np.ndarray] = []  # followed by the robot since the episode began, less what was rewound
        self._rewound = self._rewound_now = self._alarms = self._recoveries = 0
        self._recovering = False
        self._outcome: Outcome | None = None
        self._transitions: list[Transition] = []

    # --- what is so -------------------------------------------------------------------------------

    @property
    def state(self) -> InterventionState:
        return self._state

    @property
    def control_source(self) -> str:
        """Who drives: policy, recovery, correction, demo, rewind, or hold."""
        if self._state == "autonomous":
            return "policy"
        if self._state == "rewinding":
            return "rewind"
        return self._state if self._state in _DRIVEN else "hold"

    @property
    def summary(self) -> EpisodeSummary:
        """Of the present episode, or the last one where none runs."""
        with self._lock:
            from_policy = sum(t.event == "take_over" and t.before != "correction" for t in self._transitions)
            counts = from_policy, self._recoveries, self._alarms, self._rewound
            return EpisodeSummary(self._outcome, *counts, tuple(self._transitions), self._number)

    def summary_of(self, number: int) -> EpisodeSummary | None:
        """Of the present episode or the one before, by its number: another may have begun since the last tick."""
        with self._lock:
            found = self.summary if number == self._number else self._before
            return found if found is not None and found.number == number else None

    def allowed(self) -> tuple[str, ...]:
        """The events that are possible now, for a console to enable its buttons."""
        with self._lock:
            return tuple(event for event in TRANSITIONS if not self._refusal(event))

    # --- events -----------------------------------------------------------------------------------

    def begin(self, who: str) -> None:
        """A new episode: the policy starts."""
        self._do("begin", who)

    def demonstrate(self, who: str) -> None:
        """A new episode in which the person drives from its start to `success` or `failure`."""
        self._do("demonstrate", who)

    def alarm(self, reason: str, who: str = "detector") -> bool:
        """A failure seems near: pause the policy. Returns False where it does not drive (that is no error)."""
        with self._lock:
            if self._state != "autonomous":
                return False
            self._do("alarm", who, reason)
            return True

    def all_clear(self, who: str = "detector") -> bool:
        """The detector is quiet again: end a rewind. Returns False where none runs."""
        with self._lock:
            if self._state != "rewinding":
                return False
            self._do("all_clear", who)
            return True

    def pause(self, who: str, reason: str = "") -> None:
        """The robot holds; also ends a rewind."""
        self._do("pause", who, reason)

    def rewind(self, who: str) -> None:
        """Drive back along the executed path, until `all_clear`, `pause`, `take_over`, `max_rewind` or its start."""
        self._do("rewind", who)

    def resume(self, who: str) -> None:
        """After a false alarm: the policy goes on, with a fresh chunk. Refused once a person has driven."""
        self._do("resume", who)

    def take_over(self, who: str) -> None:
        """The person drives: recovery first. From a correction that fails, back to recovery."""
        self._do("take_over", who)

    def recovery_done(self, who: str) -> None:
        """Back among states that the policy knows; what follows is the correction."""
        self._do("recovery_done", who)

    def correction_done(self, who: str) -> None:
        """The sub-task is done, and so the episode ends. `success` or `failure` may still label it."""
        self._do("correction_done", who)

    def success(self, who: str) -> None:
        """The task is solved; ends the episode, or labels one that ended without a label."""
        self._do("success", who)

    def failure(self, who: str) -> None:
        """The task has failed; ends the episode, or labels one that ended without a label."""
        self._do("failure", who)

    def give(self, values: np.ndarray, stamp: float | None = None) -> None:
        """The person's newest command, float32 (A,), made at `stamp` (now). Followed only while the person drives.

        Raises:
            InterventionError: another size, or not finite.
        """
        values = np.asarray(values, np.float32)
        if values.shape != self._sign.shape or not np.isfinite(values).all():
            raise InterventionError(f"a command has {len(self._sign)} finite numbers, got {values!r:.80}")
        with self._lock:
            self._given = (values, self._clock() if stamp is None else stamp)

    def _refusal(self, event: str) -> str:
        """Why the event cannot happen now; empty where it can."""
        before, _ = TRANSITIONS[event]
        if event in ("success", "failure") and self._state == "ended" and self._outcome is None:
            return ""
        if self._state not in before:
            return f"not possible while {self._state}, only while {', '.join(before)}"
        if event == "rewind" and not self._path:
            return "there is no executed path to go back along"
        return ""

    def _do(self, event: str, who: str, reason: str = "") -> None:
        if not who.strip():
            raise InterventionError(f"{event}: say who does it")
        with self._lock:
            if event == "resume" and self._state in (*_DRIVEN, "ended"):
                raise InterventionError(
                    f"resume: not possible while {self._state}: after a person has driven, the episode ends with the "
                    "correction (rule 2); finish it, then begin a new one"
                )
            if refusal := self._refusal(event):
                possible = ", ".join(self.allowed()) or "nothing"
                raise InterventionError(f"{event}: {refusal}. Possible now: {possible}")
            before, after = self._state, TRANSITIONS[event][1]
            if begins := event in ("begin", "demonstrate"):
                self._before, self._number = self.summary, self._number + 1
                self._clear()
            if not (before in _DRIVEN and after in _DRIVEN):
                self._given = None
            self._must_begin = self._must_begin or begins
            self._must_replan = self._must_replan or event == "resume"
            self._alarms += event == "alarm"
            self._rewound_now = 0 if event == "rewind" else self._rewound_now
            if event in ("success", "failure"):
                self._outcome = "success" if event == "success" else "failure"
            self._recovering = self._recovering and after == "recovery"
            self._state = after
            transition = Transition(self._clock(), event, who, before, after, reason)
            self._transitions.append(transition)
        if self._on_transition is not None:
            self._on_transition(transition)

    # --- the control tick -------------------------------------------------------------------------

    def poll(self, observation: RobotObservation | None = None) -> OperatorCommand:
        """What this tick brings: the policy's action, a step back, the person's command, a hold, or nothing at all."""
        with self._lock:
            begin, self._must_begin = self._must_begin, False
            if self._state in ("idle", "ended"):
                return OperatorCommand(active=False)
            if self._state == "autonomous":
                replan, self._must_replan = self._must_replan, False
                return OperatorCommand(begin=begin, replan=replan)
            return OperatorCommand(begin=begin, command=self._command(observation))

    def _command(self, observation: RobotObservation | None) -> Command:
        now = self._clock()
        if self._state == "rewinding" and observation is not None:
            return Command(self._path[-1] * self._sign, "rewind", now)
        if self._state in _DRIVEN and self._given is not None:
            values, stamp = self._given
            if now - stamp <= self._timeout:
                return Command(values, self._state, stamp)
        return Command(np.zeros(len(self._sign), np.float32), "hold", now)

    def __call__(self, tick: Tick) -> None:
        """Note what the robot followed at this tick. A latched stop pauses the policy: it goes on only when told."""
        with self._lock:
            sent = tick.sent
            if sent is None or self._must_begin:  # The tick is one of the episode before.
                return
            if sent.mode == STOPPED and self._state in ("autonomous", "rewinding"):
                self._do("pause", "supervisor", "stopped")
                return
            if sent.mode != RUNNING or sent.values is None or tick.requested is None:
                return
            source = tick.requested.source
            if source == "rewind" and self._path:
                self._path.pop()
                self._rewound += 1
                self._rewound_now += 1
                if self._state == "rewinding" and (not self._path or self._rewound_now >= self._max_rewind):
                    self._do("pause", "rewind", "start of the path" if not self._path else "max_rewind")
            elif source == "recovery":
                self._recoveries += not self._recovering
                self._recovering = True
            elif source == "policy":
                self._path.append(np.asarray(sent.values, np.float32).copy())

    @property
    def path_length(self) -> int:
        """Steps that could be rewound."""
        return len(self._path)
