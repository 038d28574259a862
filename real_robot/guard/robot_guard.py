"""`vla-rl robot guard`: a small process beside the robot's driver, which stands in for deploy where that dies.

Deploy publishes each action topic under another name (`SUFFIX`). The guard forwards what comes there to the
driver's own topics, within the contract's limits, and brakes when nothing comes any more: whatever became of deploy,
its machine or the network between. It is deploy's control loop and supervisor, with commands from the graph as actions.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from real_robot.bridge.alignment import HeaderClock, Sample, Track
from real_robot.bridge.codec import begins_near, read_action
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.channels import ActionSink, AlignConfig
from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import ControlLoop, OperatorCommand, Tick
from real_robot.control.shutdown import Shutdown
from real_robot.control.supervisor import ASKED_TO_HOLD, HOLDING, STOPPED, SafetyEvent, Supervisor
from real_robot.guard.robot_lock import SUFFIX, RobotLock, claim
from real_robot.operator.operators import Operators, TopicOperator
from real_robot.transports.base import Graph, Transport, TransportError
from real_robot.transports.messages import Message, MessageError
from real_robot.types import Command, RobotObservation

Say = Callable[[str], None]
TICKS = 4  # of the control rate, without a command


def timeout_of(contract: RobotContract) -> float:
    """Seconds without a command after which the guard brakes."""
    return contract.guard.timeout or TICKS / contract.rate


def guarded_sinks(contract: RobotContract) -> tuple[ActionSink, ...]:
    """Return how deploy tells the guard each part of an action: the driver's topics under other names.

    What goes to an action server or a service comes to the guard as plain numbers: the goals are the guard's own, so
    that it cancels them when it brakes.
    """

    def told(sink: ActionSink) -> ActionSink:
        topic = sink.topic + SUFFIX
        if sink.is_goal:
            return ActionSink(topic=topic, type="std_msgs/Float64MultiArray", indices=sink.indices)
        return sink.model_copy(update={"topic": topic})

    return tuple(map(told, contract.action))


def through_guard(contract: RobotContract) -> RobotContract:
    """Return the contract of a deploy whose commands go to the guard."""
    return contract.model_copy(update={"action": guarded_sinks(contract)})


def without_cameras(contract: RobotContract) -> RobotContract:
    """The contract as the guard reads it: the robot's state as it comes, no cameras, commands soon too old."""
    seen = contract.observation
    state = []
    for source in seen.state:
        align = source.align.model_copy(update={"tolerance": seen.max_age, "strategy": "asof"})
        state.append(source if source.align.strategy == "hold" else source.model_copy(update={"align": align}))
    blind = {"images": {}, "state": tuple(state), "instruction_topic": "", "reference": ""}
    safety = contract.safety.model_copy(update={"command_timeout": timeout_of(contract)})
    return contract.model_copy(update={"observation": seen.model_copy(update=blind), "safety": safety})


class GuardedCommands:
    """Whole actions out of the messages that deploy sends to the guard.

    To the control loop an action source, an operator (inactive where no commands come: it brakes, then is quiet) and a
    pacer (a tick at each command).

    Args:
        say: told when commands stop coming, and once of each reason for which they are refused.
        header_clock: the robot's, so that a person's reset takes the clocks anew for commands too.
    """

    def __init__(
        self,
        contract: RobotContract,
        transport: Transport,
        say: Say = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        header_clock: HeaderClock | None = None,
    ) -> None:
        self._timeout, self._period, self._clock, self._say = timeout_of(contract), 1 / contract.rate, clock, say
        self._news = threading.Condition()
        self._parts: list[tuple[np.ndarray, float] | None] = [None] * len(contract.action)
        self._command: Command | None = None
        self._is_new = self._is_active = False
        self._told: set[tuple[str, str]] = set()
        self._sinks = guarded_sinks(contract)
        header_clock = header_clock or HeaderClock(clock)
        for number, sink in enumerate(self._sinks):
            align = AlignConfig(timeline="header" if sink.message_type.HAS_HEADER else "receive")
            track = Track(align, self._timeout, header_clock)
            near = begins_near(contract, sink)
            transport.subscribe(sink.topic, sink.message_type, sink.qos, self._receiver(number, sink, track, near))

    def _receiver(self, number: int, sink: ActionSink, track: Track, near: np.ndarray) -> Callable[[Message], None]:
        """`near`: numbers (len(sink.indices),) whose axis-angle a first pose's is near."""

        def receive(message: Message) -> None:
            arrival = self._clock()
            moment = track.time_of(message.stamp, arrival)
            if moment is None:
                return self._refused(sink.topic, next(reversed(track.dropped)))
            last = self._parts[number]
            try:
                values = read_action(sink, message, near=near if last is None else last[0])
            except MessageError as error:
                return self._refused(sink.topic, str(error))
            track.add(Sample(values, moment, arrival))
            with self._news:
                self._parts[number] = (values, min(moment, arrival))
                if number == len(self._sinks) - 1:  # deploy sends it last
                    self._put_together()
            return None

        return receive

    def _refused(self, topic: str, why: str) -> None:
        if (topic, why) not in self._told:
            self._told.add((topic, why))
            self._say(f"{topic}: a command is refused: {why}")

    def _put_together(self) -> None:
        parts = [part for part in self._parts if part is not None]
        if len(parts) == len(self._parts):
            values = np.zeros(sum(len(sink.indices) for sink in self._sinks), np.float32)
            for sink, (part, _) in zip(self._sinks, parts, strict=True):
                values[list(sink.indices)] = part
            self._command = Command(values, "policy", min(moment for _, moment in parts))
            self._is_new = True
            self._news.notify_all()

    # --- asked by the control loop ------------------------------------------------------------

    def submit(self, observation: RobotObservation, step: int) -> None:
        """Commands come by themselves."""

    def next_action(self, step: int) -> Command | None:
        with self._news:
            command = self._command
        return command if command is not None and self._clock() - command.stamp <= self._timeout else None

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """Active while commands come."""
        was_active, self._is_active = self._is_active, self.next_action(0) is not None
        if was_active and not self._is_active:
            self._say(f"no whole command for {self._timeout:g} s: deploy rests, or is gone; the robot is braked")
        return OperatorCommand(active=self._is_active)

    def wait(self, active: bool) -> float:
        """Wait for the next command; where none comes in time, for a tick."""
        with self._news:
            self._news.wait_for(lambda: self._is_new, (1.5 if active else 1.0) * self._period)
            self._is_new = False
        return 0.0

    def reset(self) -> None:
        with self._news:
            self._command, self._parts = None, [None] * len(self._sinks)

    def close(self) -> None:
        """Nothing to release."""


class StopsAll:
    """An observer that has the robot's other processes stop too, where the guard's own checks have stopped it."""

    def __init__(self, lock: RobotLock, supervisor: Supervisor) -> None:
        self._lock, self._supervisor, self._was_stopped = lock, supervisor, False

    def __call__(self, tick: Tick) -> None:
        is_stopped = tick.sent is not None and tick.sent.mode == STOPPED
        if is_stopped and not self._was_stopped and tick.operator_command.stop is None:
            self._lock.stop_all(self._supervisor.state.reason)
        self._was_stopped = is_stopped


def run_guard(contract: RobotContract, say: Say) -> None:
    """Guard the robot until a signal; it stands then.

    Raises:
        TransportError: the robot's graph cannot be reached, is none, or another process drives the robot.
    """
    topics = ", ".join(sink.topic for sink in guarded_sinks(contract))
    seen = without_cameras(contract)
    with Shutdown(say) as shutdown, ExitStack() as stack:
        transport = contract.open_transport("guard")
        stack.callback(transport.close)
        if not isinstance(transport, Graph):
            raise TransportError(
                f"transport {contract.transport.kind}: no other process can be reached through it, so nothing can be "
                "guarded; see docs/safety.md for what such a robot does when deploy dies"
            )
        lock = claim(contract, transport, "robot guard", shutdown.say, stack)
        assert lock is not None, "a graph has a lock"
        robot = TopicRobot(seen, transport)
        robot.is_silent = lambda: lock.is_silent

        def tell(event: SafetyEvent) -> None:
            if event.text != f"{HOLDING}: {ASKED_TO_HOLD}":  # it asks itself: `GuardedCommands` has told why
                shutdown.say(f"safety: {event.text}")

        supervisor = Supervisor(seen.safety, on_event=tell, state_checks=robot.state_checks)
        commands = GuardedCommands(contract, transport, shutdown.say, header_clock=robot.header_clock)
        operator = Operators([shutdown, TopicOperator(contract.operator, transport), commands, lock])
        observers = [lock, StopsAll(lock, supervisor)]
        loop = ControlLoop(robot, commands, supervisor, operator, commands, silence=math.inf, observers=observers)
        shutdown.say(f"guard: {contract.name}: forwards {topics}; brakes after {timeout_of(contract):g} s without")
        shutdown.run(loop)
    lock.check_held()
    shutdown.exit(is_complete=True)
