"""The control loop next to the robot, on one screen: observe, ask, filter, send, report.

    loop = ControlLoop(robot, actions, supervisor, operator, pacer)
    loop.run()

The supervisor comes last and has the last word, over the policy and over people. The loop itself never
waits for the policy: an action source that has nothing yet gives None, and the supervisor holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from real_robot.control.supervisor import RUNNING, STOPPED, SentCommand, Supervisor
from real_robot.types import Command, Deadman, RobotObservation

_log = logging.getLogger(__name__)
WAIT = Command(np.zeros(0, np.float32), "hold", 0.0)  # of an action source: send nothing until there is an action
BY_HAND = ("console", "keyboard")  # what the reason of a stop that a person pressed begins with
IDLE_TICK = 0.1  # seconds between looks at the operator while the robot is inactive
STANDING = 0.2  # seconds for which a standstill is told before the process may end, which may lose its last message


class Robot(Protocol):
    """What the control loop needs of a robot."""

    def read(self) -> RobotObservation | None:
        """The present observation, or None where some part of it is missing or too old. Does not block."""
        ...

    def wait(self, timeout: float) -> bool:
        """Block until the reference topic has a message that `read` has not used, at most `timeout` seconds."""
        ...

    def send(self, values: np.ndarray, moves: bool = True) -> None:
        """Send an action, float32 (A,). `moves` False: it brakes or stands, so goals under way are canceled as well."""
        ...

    def halt(self) -> None:
        """Cancel goals that are under way: the robot is not to move, and nothing is sent."""
        ...

    def flush(self, before: float = float("inf")) -> None:
        """Forget what was received before that time (monotonic), and trust the clocks as they are now."""
        ...

    @property
    def fault(self) -> str | None:
        """Why the robot cannot be relied on now, or None."""
        ...

    def close(self) -> None: ...


class ActionSource(Protocol):
    """Gives the policy's actions: `execution.ChunkExecutor`, or `playback.SynchronousActions` for simulators.

    `step` counts the actions that were followed since the episode's start: while the robot holds, nothing of
    a chunk passes.
    """

    def submit(self, observation: RobotObservation, step: int) -> None:
        """Offer the newest observation, made before `step`."""
        ...

    def next_action(self, step: int) -> Command | None:
        """The policy's action for `step`, or None where there is none (yet): the robot holds.

        `WAIT` for simulators that wait for their policy: nothing is sent, and it is asked again at the next tick.
        """
        ...

    def reset(self) -> None:
        """Drop every queued action: a new episode, a reset after a stop, or control that comes back from a person."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OperatorCommand:
    """What the operator wants at one tick.

    Attributes:
        active: the robot may move at all; False sends nothing.
        begin: a new episode begins with this tick.
        replan: drop the policy's queued actions; the episode goes on.
        command: a person's own action, in place of the policy's.
        stop: reason to stop now, until a reset. reset: who resets, after a stop.
        by_topic: the reset came over the graph, from anybody; it undoes no stop that a person pressed.
        deadman: the last word from the deadman switch and when it was received; None where there is no switch.
        finished: end the loop.
    """

    active: bool = True
    begin: bool = False
    replan: bool = False
    command: Command | None = None
    stop: str | None = None
    reset: str | None = None
    by_topic: bool = False
    deadman: Deadman | None = None
    finished: bool = False


class Operator(Protocol):
    """Whoever watches over the robot: a console, topics, a script."""

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """What is wanted now. Must not block."""
        ...


@dataclass(frozen=True)
class Tick:
    """All there is to know of one control tick, for recorders, consoles and failure detectors.

    Attributes:
        step: actions followed in the episode so far. time: monotonic seconds at its start.
        observation: what the robot showed; None where a part was missing or too old.
        is_new: it is another one than at the tick before.
        requested: what the policy, or a person, asked. sent: what the supervisor made of it; None while inactive.
        late: seconds that the tick began after it was due. latency: seconds that the tick took.
        operator_command: what the operator wanted.
    """

    step: int
    time: float
    observation: RobotObservation | None
    is_new: bool
    requested: Command | None
    sent: SentCommand | None
    late: float
    latency: float
    operator_command: OperatorCommand = field(default_factory=OperatorCommand)


class Pacer(Protocol):
    """Waits until a tick is due."""

    def wait(self, active: bool) -> float:
        """Wait, and return how late the tick is, seconds. `active`: the robot may move."""
        ...


class ClockPacer:
    """A tick every 1 / rate seconds of the monotonic clock. Ticks that were missed are skipped, not made up for."""

    def __init__(self, rate: float) -> None:
        self._period = 1 / rate
        self._due = time.monotonic()

    def wait(self, active: bool) -> float:
        self._due += self._period
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
            return time.monotonic() - self._due
        late = now - self._due
        self._due += late // self._period * self._period
        return late


class ReferencePacer:
    """A tick at each new observation, and after `timeout` seconds without one; sooner while the robot is inactive."""

    def __init__(self, robot: Robot, timeout: float) -> None:
        self._robot, self._timeout = robot, timeout

    def wait(self, active: bool) -> float:
        self._robot.wait(self._timeout if active else min(self._timeout, IDLE_TICK))
        return 0.0


class ControlLoop:
    """Ties a robot, an action source, the supervisor and an operator together.

    Args:
        needs_new: ask for an action only at a new observation (pace: reference), so that a robot that is
            late gets each action once.
        silence: seconds without an observation, or without an action of the policy, after which the robot is
            stopped until a person resets it; the supervisor holds much earlier.
        observers: called with each tick, in order, after the command was sent; they must not block.
        why: says why there is no "observation", or no "action"; empty where it knows nothing.
        warms_up: whether the policy still computes its very first actions, which may take longer than `silence`.
    """

    def __init__(
        self,
        robot: Robot,
        actions: ActionSource,
        supervisor: Supervisor,
        operator: Operator,
        pacer: Pacer,
        needs_new: bool = False,
        silence: float = 2.0,
        observers: Sequence[Callable[[Tick], None]] = (),
        why: Callable[[str], str] = lambda missing: "",
        warms_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.robot, self.actions, self.supervisor, self.operator = robot, actions, supervisor, operator
        self.pacer, self.needs_new, self.observers = pacer, needs_new, list(observers)
        self.step = 0
        self._was_active = False
        self._num_values = len(supervisor.config.dimensions)
        self._seen = float("-inf")
        self._waits_since: float | None = None  # for a chunk, with nothing sent
        self._watchdog, self._warms_up = Watchdog(silence, why), warms_up
        self._pressed = ""  # the stop that a person has pressed, until a person resets it

    def run(self) -> None:
        """Tick until the operator has finished, then brake and stand."""
        active = False
        try:
            while not (operator_command := self.tick(self.pacer.wait(active)).operator_command).finished:
                active = operator_command.active
        finally:
            self.brake()

    def brake(self) -> None:
        """Come to a standstill, also where sending fails meanwhile: it is tried at each tick."""
        config, num_told = self.supervisor.config, 0
        enough = round(STANDING * config.control_hz) + 1
        for _ in range(round(config.stopping_time() * config.control_hz) + enough):
            try:
                self._send(self._hold())
                num_told += self.supervisor.is_still
            except Exception:  # whatever it is, the next tick may get through
                _log.exception("braking: not sent")
            if num_told == enough:
                return
            time.sleep(1 / config.control_hz)

    def tick(self, late: float = 0.0) -> Tick:
        """Make one control tick."""
        start = time.monotonic()
        observation = self.robot.read()
        is_new = observation is not None and observation.stamp > self._seen
        operator_command = self._heed(self.operator.poll(observation))
        if self._obey(operator_command):
            observation, is_new = None, False  # It may be from before.
        if operator_command.active and not self._was_active:
            self.supervisor.reseed()  # While nothing was sent, the robot may have been moved.
        self._was_active = operator_command.active
        if observation is not None and is_new:
            self._seen = observation.stamp
            self.supervisor.observe(observation)
        requested, sent, step = None, None, self.step
        if operator_command.active:
            requested = operator_command.command or self._ask(observation, is_new)
            waits = self._may_wait(requested, start)
            moves = requested is not None and requested.source != "hold"
            acts = moves or operator_command.command is not None or self._warms_up()
            if reason := self._watchdog.trouble(start, is_new, acts):
                self.supervisor.stop(reason)
            if not waits:
                sent = self._send(None if requested is WAIT else requested)
                self._count(moves, sent)
        else:
            self._watchdog.restart(start)
            self.robot.halt()
            if not self.supervisor.is_still:
                sent = self._send(self._hold())
        tick = Tick(step, start, observation, is_new, requested, sent, late, time.monotonic() - start, operator_command)
        for observer in self.observers:
            observer(tick)
        return tick

    def _heed(self, wanted: OperatorCommand) -> OperatorCommand:
        """Without a reset that counts for nothing: what stopped the robot lasts, or a person pressed it by hand."""
        if wanted.stop is not None and wanted.stop.startswith(BY_HAND):
            self._pressed = wanted.stop
        if wanted.reset is None:
            return wanted
        lasts = wanted.stop or self.robot.fault
        if wanted.by_topic and self._pressed:
            lasts = lasts or f"{self._pressed} pressed stop; reset it at the console or the keys, not by a topic"
        if not lasts:
            self._pressed = ""
            return wanted
        self.supervisor.refuse_reset(wanted.reset, lasts)
        return replace(wanted, reset=None)

    def _obey(self, operator_command: OperatorCommand) -> bool:
        """Stops, resets, the deadman switch, the robot's own faults. Returns whether everything begins anew."""
        if operator_command.deadman is not None:
            self.supervisor.deadman(*operator_command.deadman)
        if operator_command.stop is not None:
            self.supervisor.stop(operator_command.stop)
        if fault := self.robot.fault:
            self.supervisor.stop(fault)
        elif operator_command.reset is not None:
            self.supervisor.reset(operator_command.reset)
            self.robot.flush()
        begins = operator_command.begin or operator_command.reset is not None
        if begins:
            self.actions.reset()
            self.supervisor.begin()
            self._watchdog.restart(time.monotonic())
            self.step, self._seen, self._waits_since = 0, float("-inf"), None
        elif operator_command.replan:
            self.actions.reset()
        return begins

    def _count(self, moves: bool, sent: SentCommand) -> None:
        """A step is an action that was followed. One that is forbidden costs the queue: none is played late."""
        if moves and sent.mode == RUNNING:
            self.step += 1
        elif moves:
            self.actions.reset()

    def _ask(self, observation: RobotObservation | None, is_new: bool) -> Command | None:
        """The policy's action; a hold where it has none. None where nothing new is to be asked."""
        skips = self.needs_new and not is_new and self._waits_since is None
        if observation is None or skips or self.supervisor.state.mode == STOPPED:
            return None
        if is_new:
            self.actions.submit(observation, self.step)
        return self.actions.next_action(self.step) or self._hold()

    def _may_wait(self, requested: Command | None, now: float) -> bool:
        """Whether to send nothing at this tick: the action is waited for, a person permits, and not for long yet."""
        self._waits_since = (self._waits_since or now) if requested is WAIT else None
        is_young = self._waits_since is not None and now - self._waits_since <= self.supervisor.config.command_timeout
        return is_young and self.supervisor.is_permitted

    def _hold(self) -> Command:
        return Command(np.zeros(self._num_values, np.float32), "hold", time.monotonic())

    def _send(self, command: Command | None) -> SentCommand:
        sent = self.supervisor.filter(command)
        if sent.values is not None:
            self.robot.send(sent.values, moves=sent.mode == RUNNING)
        return sent


class Watchdog:
    """How long there has been no observation, or no action, while there should have been.

    Counts from the first observation, or from the last `restart`: a robot may come up after its bridge.
    """

    def __init__(self, limit: float, why: Callable[[str], str] = lambda missing: "") -> None:
        self._limit, self._why = limit, why
        self._observed = self._acted = float("inf")

    def restart(self, now: float) -> None:
        self._observed = self._acted = now

    def trouble(self, now: float, observed: bool, acted: bool) -> str | None:
        """What has been missing for too long at this tick, or None."""
        if observed and self._observed == float("inf"):
            self.restart(now)
        self._observed = now if observed else self._observed
        self._acted = now if acted else self._acted
        for what, since in (("observation", self._observed), ("action", self._acted)):
            if now - since > self._limit:
                why = self._why(what)
                return f"no {what} for {self._limit:g} s" + (f": {why}" if why else "")
        return None
