"""The safety supervisor: the last thing between any command, a policy's or a person's, and the robot.

It runs in the robot's process, needs neither network nor torch, never blocks, and is asked at every control tick.
What it sends keeps the limits of `SafetyConfig` whatever is asked, however late, and however often. It holds when
observations or commands stop coming, and a stop stays until a person resets it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from real_robot.checks import Motion, MotionCheck, Patience, StateCheck, ask, without_numbers
from real_robot.contract.safety import DimensionLimits, SafetyConfig, Workspace
from real_robot.control.limiter import Limiter, WorkspaceGuard
from real_robot.control.motion import VelocityFollowing
from real_robot.control.plausibility import CommandReader, CutShare, plausibility_checks
from real_robot.types import Command, Deadman, RobotObservation

__all__ = [
    "DimensionLimits", "SafetyConfig", "SafetyEvent", "SentCommand", "State", "Supervisor", "Workspace",
]  # fmt: skip

MAX_FROZEN_TICKS = 5
CLOCK_TOLERANCE = 0.02  # seconds that a stamp may lie in the future before it is refused
RUNNING, HOLDING, STOPPED = "running", "holding", "stopped"
ASKED_TO_HOLD = "asked to hold"  # why it holds where a command said so


class State(NamedTuple):
    """What the supervisor does, and why: running, holding (goes on by itself) or stopped (until a reset)."""

    mode: str
    reason: str


@dataclass(frozen=True)
class SentCommand:
    """What came of one tick. Log every one.

    Attributes:
        values: float32 (A,) to send now; None: send nothing (dry run, or the robot's position is not known yet).
        requested: float32 (A,) as asked at this tick; None when nothing new was asked.
        limited: which limits and rules acted, by name.
        mode: running, holding or stopped.
        allowed: float32 (A,), what the limits made of it: `values`, also in a dry run.
    """

    values: np.ndarray | None
    requested: np.ndarray | None
    limited: tuple[str, ...]
    mode: str
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class SafetyEvent:
    """Something a person should see in the log.

    Attributes:
        stamp: seconds on the supervisor's clock.
        kind: state (mode or reason changed), observation (one was refused), reset, limits (many commands are cut).
        text: what happened.
    """

    stamp: float
    kind: str
    text: str


class Supervisor:
    """See the module. Methods may be called from any thread, `stop` also from a signal handler.

    Args:
        config: the limits.
        clock: monotonic seconds, the same that stamps observations and commands.
        on_event: called with each `SafetyEvent`, after the decision; if it raises, the robot is stopped.
        motion_checks: what is about to be sent must pass them; else the robot brakes to a standstill.
        state_checks: what the robot reports must pass them, and those of `plausibility`; else it holds, and stops
            after `checks.stop_after`.
        why_stale: says why there is no observation: which stream, and what is wrong with it.
    """

    def __init__(
        self,
        config: SafetyConfig,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[SafetyEvent], None] | None = None,
        motion_checks: Sequence[MotionCheck] = (),
        state_checks: Sequence[StateCheck] = (),
        why_stale: Callable[[], str] = lambda: "",
    ) -> None:
        self.config, self._why_stale = config, why_stale
        self._following, self._cuts = VelocityFollowing(config), CutShare(config)
        plausible = *plausibility_checks(config), self._following
        self._motion_checks, self._state_checks = tuple(motion_checks), (*plausible, *state_checks)
        self._refusal: tuple[str, str] | None = None  # (check, why) it brakes, until it stands
        self._trouble: tuple[str, str] | None = None  # (check, what) is wrong with the newest observation
        self._patience = Patience(config.checks.stop_after)
        self._clock, self._on_event = clock, on_event
        self._lock = threading.RLock()
        self._limiter = Limiter(config)
        self._state = State(HOLDING, "no observation yet")
        self._events: deque[SafetyEvent] = deque()
        self._last_tick: float | None = None
        self._frozen = 0  # ticks one after the other at which the clock had not moved
        self._observation: RobotObservation | None = None
        self._must_seed = True
        self._target: Command | None = None
        self._refused = ""  # why the newest command is not followed
        self._reader = CommandReader(self._limiter.names, config.max_refused)
        self._not_before = -math.inf
        self._deadman = Deadman(False, -math.inf)
        self._workspace = WorkspaceGuard(config)

    # --- what others tell it ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Mode and reason, as of the last tick or stop."""
        return self._state

    @property
    def is_still(self) -> bool:
        """What was sent last moves nothing."""
        return self._limiter.is_still

    @property
    def is_permitted(self) -> bool:
        """No stop is in force, and the deadman switch, where there is one, is held."""
        with self._lock:
            return self._state.mode != STOPPED and (not self.config.deadman or self._deadman_held(self._clock()))

    def observe(self, observation: RobotObservation) -> None:
        """Take the newest observation. One that is older, from the future, or holds NaN is refused, so goes stale."""
        with self._lock:
            now = self._clock()
            trouble = self._trouble_with(observation, now)
            if trouble:
                self._tell("observation", trouble, now)
            else:
                self._observation = observation
                self._trouble = self._find_trouble(observation)
        self._deliver()

    def stop(self, reason: str) -> None:
        """Brake, then stand, until `reset`. The first reason is kept."""
        with self._lock:
            self._target = None
            if self._state.mode != STOPPED:
                self._enter(State(STOPPED, reason), self._clock())
        self._deliver()

    def reset(self, operator: str) -> None:
        """A person allows motion again after a stop. It begins with commands made from now on, where the robot is.

        Raises:
            ValueError: no name of who resets.
        """
        if not operator.strip():
            raise ValueError("reset: say who resets; got an empty name")
        with self._lock:
            now = self._clock()
            if self._state.mode == STOPPED:
                self._tell("reset", f"{operator} resets after: {self._state.reason}", now)
                self._drop(now)
                self._must_seed = True
                self._forget()
                self._reader.restart()
                self._enter(State(HOLDING, "reset; no observation since"), now)
        self._deliver()

    def refuse_reset(self, operator: str, reason: str) -> None:
        """Say that a reset counts for nothing: what stopped the robot still lasts."""
        with self._lock:
            self._tell("reset", f"{operator}: no reset while it lasts: {reason}", self._clock())
        self._deliver()

    def begin(self) -> None:
        """A new episode: the robot may have been moved since the last observation, which is forgotten."""
        with self._lock:
            self._observation = None
            self._forget()

    def reseed(self) -> None:
        """Begin again where the robot is measured to be, once it stands: it may have been moved since it was told.

        Nothing is sent meanwhile, but the braking to a standstill: what was sent last may be far from there.
        """
        with self._lock:
            if self._limiter.state_size:
                self._must_seed = True
                if self._limiter.is_still:
                    self._limiter.forget()

    def deadman(self, pressed: bool, heard: float | None = None) -> None:
        """The state of the deadman switch, received at `heard` (now); must be received anew in `deadman_timeout`."""
        with self._lock:
            self._deadman = Deadman(bool(pressed), self._clock() if heard is None else heard)

    # --- every tick ---------------------------------------------------------------------------

    def filter(self, command: Command | None) -> SentCommand:
        """What to send at this tick.

        Args:
            command: what is asked; None when nothing new was. The last one holds until `command_timeout`. One with
                source "hold" brakes and holds, whatever its values.
        """
        with self._lock:
            now = self._clock()
            dt = self._advance(now)
            limited: set[str] = set()
            requested, rule = None, None
            if command is not None:
                requested, rule = self._take(command, now)
                limited |= {rule} if rule else set()
            if not self._seed_if_due(now) and self._state.mode != STOPPED:
                limited.add("observation")
            hold = self._decide(now)
            allowed = None
            if self._limiter.is_known:
                target = self._target.values.astype(np.float64) if hold is None and self._target is not None else None
                allowed, acted = self._move(target, dt)
                hold = hold or self._refusal
                limited |= acted
                self._workspace.remember(self._limiter.values, now)
                self._following.remember(self._limiter.values, now)
            if hold is None and command is not None and rule is None:
                self._reader.note_followed()
                if requested is not None and allowed is not None:
                    self._note_cuts(self._cuts.note(requested, allowed, limited), now)
            if self._state.mode != STOPPED:
                self._enter(State(HOLDING, hold[1]) if hold else State(RUNNING, ""), now)
            limited |= {hold[0]} if hold else set()
            values = allowed
            if self.config.dry_run:
                values = None
                limited.add("dry_run")
            sent = SentCommand(values, requested, tuple(sorted(limited)), self._state.mode, allowed)
        self._deliver()
        return sent

    def _note_cuts(self, text: str | None, now: float) -> None:
        if text is not None and self.config.checks.stop_when_cut:
            self._enter(State(STOPPED, text), now)
        elif text is not None:
            self._tell("limits", text, now)

    def _advance(self, now: float) -> float:
        """Seconds that motion may use at this tick, at most the tick's length."""
        tick, last = self._limiter.tick, self._last_tick
        self._last_tick = now
        if last is None:
            return tick
        gap = now - last
        self._frozen = self._frozen + 1 if gap == 0 else 0
        if self._frozen >= MAX_FROZEN_TICKS:
            self._limiter.halt()
            if self._state.mode != STOPPED:
                self._enter(State(STOPPED, "the clock stands still"), now)
        if not gap >= 0:  # NaN too
            self._observation = None
            self._workspace.forget()
            self._drop(now)
            if self._state.mode != STOPPED:
                self._enter(State(STOPPED, "the clock went backwards"), now)
            return 0.0
        if gap > 2 * tick:
            self._limiter.stand()
        return min(gap, tick)

    def _take(self, command: Command, now: float) -> tuple[np.ndarray | None, str | None]:
        """Check a command and make it the target. Returns it as an array, and the rule that refused it."""
        requested, trouble = self._reader.read(command)
        if trouble:
            self._target, self._refused = None, f"command refused: {trouble}"
            if self._reader.is_over and self._state.mode != STOPPED:
                self._enter(State(STOPPED, f"{self._reader.num_refused} commands refused, the last: {trouble}"), now)
            return requested, "bad_command"
        age = now - command.stamp
        newest = self._target.stamp if self._target is not None else -math.inf
        if not -CLOCK_TOLERANCE <= age <= self.config.command_timeout or command.stamp < newest:
            return requested, "stale_command"
        if command.stamp < self._not_before:
            return requested, "dropped_command"
        assert requested is not None, "readable"
        self._refused = ""
        self._target = Command(requested, command.source, min(command.stamp, now))
        return requested, None

    def _decide(self, now: float) -> tuple[str, str] | None:
        """Why the target may not be followed: (rule, reason), or None where it may. Enters a stop."""
        outside = self._workspace.left(self._observation) if self._observation is not None else None
        if self._state.mode != STOPPED and outside is not None:
            self._enter(State(STOPPED, outside), now)
            return "workspace", outside
        if self._state.mode != STOPPED and self._patience.is_over(now, self._trouble is not None):
            assert self._trouble is not None, "it is what lasts"
            self._enter(State(STOPPED, self._trouble[1]), now)
            return self._trouble
        if self._state.mode == STOPPED:
            return "stopped", self._state.reason
        if self._refusal is not None and self._limiter.is_still:
            self._refusal = None
        if self.config.deadman and not self._deadman_held(now):
            return "deadman", "deadman switch released"
        if not self._is_fresh(now):
            return "observation", self._staleness()
        if self._must_seed:
            return "observation", "no observation since the reset"
        if self._trouble is not None:
            return self._trouble
        if self._refused:
            return "bad_command", self._refused
        if self._target is None or not 0 <= now - self._target.stamp <= self.config.command_timeout:
            self._target = None
            return "command_timeout", "no command"
        if self._target.source == "hold":
            return "hold", ASKED_TO_HOLD
        return self._refusal

    def _move(self, target: np.ndarray | None, dt: float) -> tuple[np.ndarray, set[str]]:
        """What to send now, and the limits that acted. A motion that a check refuses becomes a braking one."""
        before = self._limiter.snapshot()
        room, robot = None, self._following
        if self._observation is not None:
            room = self._workspace.room(self._observation, robot.gain, robot.delay)
        allowed, acted = self._limiter.move(target, dt, room)
        if target is None or self._observation is None:
            return allowed, acted
        motion = Motion(
            allowed, self._limiter.braking_way, self._observation, self._limiter.tick, self._workspace.moved_since
        )
        for check in self._motion_checks:
            reason = ask(check.name, lambda check=check: check.refuse(motion))
            if reason is not None:
                self._refusal = check.name, reason
                self._limiter.restore(before)
                return self._limiter.move(None, dt, room)
        return allowed, acted

    def _find_trouble(self, observation: RobotObservation) -> tuple[str, str] | None:
        """The first trouble that a check has with what the robot reports. Each check is shown each observation."""
        is_obeyed = self._limiter.is_known and not self._must_seed and not self.config.dry_run
        sent = self._limiter.values.copy() if is_obeyed else None
        found = [
            (check.name, ask(check.name, lambda check=check: check.trouble(observation, sent)))
            for check in self._state_checks
        ]
        return next(((name, reason) for name, reason in found if reason is not None), None)

    def _forget(self) -> None:
        self._trouble = None
        self._patience.forget()
        self._cuts.restart()
        for check in self._state_checks:
            check.restart()

    # --- parts --------------------------------------------------------------------------------

    def _is_fresh(self, now: float) -> bool:
        if self._observation is None:
            return False
        age = now - self._observation.stamp
        return -CLOCK_TOLERANCE <= age <= self.config.observation_timeout

    def _staleness(self) -> str:
        """Told once for as long as it lasts: which stream's fault it is may only be known after a while."""
        what = "no observation yet" if self._observation is None else "observations are stale"
        if self._state.mode == HOLDING and self._state.reason.startswith(f"{what}: "):
            return self._state.reason
        why = self._why_stale()
        return f"{what}: {why}" if why else what

    def _deadman_held(self, now: float) -> bool:
        pressed, told = self._deadman
        return pressed and 0 <= now - told <= self.config.deadman_timeout

    def _trouble_with(self, observation: RobotObservation, now: float) -> str | None:
        state = np.asarray(observation.state)
        if not math.isfinite(observation.stamp) or observation.stamp > now + CLOCK_TOLERANCE:
            return f"observation refused: its stamp {observation.stamp:.3f} is not in the past (now {now:.3f})"
        if self._observation is not None and observation.stamp < self._observation.stamp:
            return "observation refused: older than the one before"
        needed = max(self._limiter.state_size, self._workspace.state_size)
        if state.ndim != 1 or state.shape[0] < needed:
            return f"observation refused: state of shape {state.shape}, at least ({needed},) is needed"
        if state.dtype.kind not in "fiu" or not np.isfinite(state).all():
            return "observation refused: its state is not finite"
        return None

    def _seed_if_due(self, now: float) -> bool:
        """Learn where the robot is, at the start and after a reset. False while that is not known."""
        if not self._must_seed:
            return True
        if self._state.mode == STOPPED or not self._is_fresh(now) or self._observation is None:
            return False
        if self._observation.stamp < self._not_before:
            return False
        if self._limiter.is_known and not self._limiter.is_still:
            return False  # it still brakes
        if (outside := self._limiter.seed(np.asarray(self._observation.state, np.float64))) is not None:
            self._enter(State(STOPPED, f"{outside}: move it inside by hand, then reset"), now)
            return False
        self._must_seed = False
        return True

    def _drop(self, now: float) -> None:
        self._target, self._not_before, self._refused = None, now, ""

    def _enter(self, state: State, now: float) -> None:
        before, self._state = self._state, state
        if state.mode != before.mode or without_numbers(state.reason) != without_numbers(before.reason):
            self._tell("state", f"{state.mode}: {state.reason}" if state.reason else state.mode, now)

    def _tell(self, kind: str, text: str, now: float) -> None:
        if self._on_event is not None and len(self._events) < 1000:
            self._events.append(SafetyEvent(now, kind, text))

    def _deliver(self) -> None:
        while self._on_event is not None:
            with self._lock:
                if not self._events:
                    return
                event = self._events.popleft()
            try:
                self._on_event(event)
            except Exception as error:  # a broken log must not take the supervisor with it, nor go unseen
                with self._lock:
                    if self._state.mode != STOPPED:
                        self._state = State(STOPPED, f"the event log failed: {type(error).__name__}: {error}")
