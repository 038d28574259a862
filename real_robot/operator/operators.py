"""Operators without a console: topics, and keys in the terminal; several at once."""

from __future__ import annotations

import atexit
import contextlib
import io
import math
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TextIO

from real_robot.contract.sections import OperatorTopics
from real_robot.control.robot_loop import Operator, OperatorCommand
from real_robot.operator.intervention import InterventionError
from real_robot.transports.base import QosConfig, Transport
from real_robot.transports.messages import Bool, Message, String
from real_robot.types import Deadman, RobotObservation

KEYS = "Enter starts and holds, space stops (emergency), r resets after a stop, q ends"
SCENE_KEY = "n lays the scene out anew"


class Operators:
    """Several operators at once: any one may stop or finish, all must agree that the robot is active."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = list(operators)

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        operator_command = OperatorCommand()
        for operator in self._operators:
            own = operator.poll(observation)
            is_first = operator_command.reset is None or operator_command.by_topic  # a person's own before a topic's
            resets = own if own.reset and is_first else operator_command
            operator_command = OperatorCommand(
                active=operator_command.active and own.active,
                begin=operator_command.begin or own.begin,
                replan=operator_command.replan or own.replan,
                command=operator_command.command or own.command,
                stop=operator_command.stop or own.stop,
                reset=resets.reset,
                by_topic=resets.by_topic,
                deadman=_both(operator_command.deadman, own.deadman),
                finished=operator_command.finished or own.finished,
            )
        return operator_command


def _both(one: Deadman | None, other: Deadman | None) -> Deadman | None:
    """Of two switches both must be held, and the word of both be young."""
    if one is None or other is None:
        return one or other
    return Deadman(one.pressed and other.pressed, min(one.heard, other.heard))


class TopicOperator:
    """The contract's stop, reset and deadman topics. A stop that lasts is repeated at each tick; none is too short.

    What keeps a person's permission is as old as the message that gave it: a switch whose node is gone says no
    more, so that it counts as released after `safety.deadman_timeout`. With `stop_timeout`, a stop button
    that falls silent stops the robot, and one that was never heard keeps it inactive.
    """

    def __init__(
        self, topics: OperatorTopics, transport: Transport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._topics, self._clock = topics, clock
        self._stop, self._stop_heard = False, -math.inf
        self._was_stopped = False  # since the last tick, also where it has been let go since
        self._lock = threading.Lock()
        self._deadman = Deadman(False, -math.inf) if topics.deadman else None
        self._reset: str | None = None
        handlers: list[tuple[str, type[Message], Callable[[Any], None]]] = [
            (topics.stop, Bool, self._on_stop),
            (topics.deadman, Bool, self._on_deadman),
            (topics.reset, String, self._on_reset),
        ]
        for topic, kind, handler in handlers:
            if topic:
                transport.subscribe(topic, kind, QosConfig(depth=10), handler)

    def _on_stop(self, message: Bool) -> None:
        with self._lock:
            self._stop, self._stop_heard = message.data, self._clock()
            self._was_stopped = self._was_stopped or message.data

    def _on_deadman(self, message: Bool) -> None:
        self._deadman = Deadman(message.data, self._clock())

    def _on_reset(self, message: String) -> None:
        self._reset = message.data.strip() or "topic"

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        reset, self._reset = self._reset, None
        with self._lock:
            is_stopped, self._was_stopped = self._was_stopped or self._stop, False
        stop, limit = "stop topic" if is_stopped else None, self._topics.stop_timeout
        was_heard = self._stop_heard > -math.inf
        if limit and was_heard and self._clock() - self._stop_heard > limit:
            stop = f"the stop topic {self._topics.stop} has been silent for {limit:g} s"
        is_active = was_heard or not limit
        by_topic = reset is not None
        return OperatorCommand(is_active, stop=stop, reset=reset, by_topic=by_topic, deadman=self._deadman)


class Ending(Protocol):
    """Whose episode a sensor may end: `Intervention`, or `KeyOperator`."""

    def success(self, who: str) -> None:
        """The task is solved."""
        ...

    def failure(self, who: str) -> None:
        """The task has failed."""
        ...


class OutcomeTopic:
    """A sensor's word, on `operator.outcome`, that an episode is over and how it went.

    Args:
        tell: called with what a person should know: a word that means nothing, or that comes while no episode runs.
    """

    def __init__(self, topic: str, transport: Transport, episode: Ending, tell: Callable[[str], None]) -> None:
        self._topic, self._episode, self._tell = topic, episode, tell
        transport.subscribe(topic, String, QosConfig(depth=10), self._on_outcome)

    def _on_outcome(self, message: Any) -> None:
        try:
            match message.data.strip():
                case "success":
                    self._episode.success(self._topic)
                case "failure":
                    self._episode.failure(self._topic)
                case other:
                    self._tell(f"{self._topic}: got {other[:40]!r}, allowed: success, failure")
        except InterventionError as error:
            self._tell(f"{self._topic}: {error}")


class KeyOperator:
    """Keys in the terminal (see `KEYS`); from a pipe, the same letters, with a newline for Enter.

    The robot starts inactive. The end of a pipe changes nothing. `on_scene`: what n does, with who asks for it.
    """

    on_scene: Callable[[str], None] | None = None

    def __init__(
        self, stream: TextIO | None = None, active: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._stream, self._say = stream or sys.stdin, say
        self._pending: list[str] = []
        self._active = self._begins = active
        threading.Thread(target=self._read, daemon=True).start()

    def alarm(self, reason: str) -> bool:
        """A failure detector's: the robot holds as after Enter. False where it was not active."""
        was_active, self._active = self._active, False
        if was_active:
            self._say(f"alarm: {reason}. The robot holds; Enter begins anew")
        return was_active

    def all_clear(self) -> bool:
        """There is nothing that this would end."""
        return False

    def success(self, who: str) -> None:
        """A sensor's word; nothing where the robot is not active."""
        self._end("success", who)

    def failure(self, who: str) -> None:
        """As `success`."""
        self._end("failure", who)

    def _end(self, outcome: str, who: str) -> None:
        was_active, self._active = self._active, False
        if was_active:
            self._say(f"{outcome} ({who}). The robot holds; Enter begins the next episode")

    def _new_scene(self) -> None:
        try:
            if self.on_scene is not None:
                self.on_scene("keyboard")
        except InterventionError as error:
            self._say(str(error))

    def _read(self) -> None:
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")  # else a byte that is no character would be the last key
        with _single_keys(self._stream):
            while character := self._stream.read(1):
                self._pending.append(character)

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        operator_command = OperatorCommand(active=self._active, begin=self._active and self._begins)
        self._begins = False
        while self._pending:
            key = self._pending.pop(0)
            if key == " ":
                operator_command, self._active = replace(operator_command, stop="keyboard"), False
            elif key == "r":
                operator_command = replace(operator_command, reset="keyboard")
            elif key == "q":
                operator_command = replace(operator_command, finished=True)
            elif key == "n" and not self._active:
                self._new_scene()
            elif key in "\r\n":
                self._active = not self._active
                operator_command = replace(operator_command, begin=self._active)
        return replace(operator_command, active=self._active)


@contextlib.contextmanager
def _single_keys(stream: TextIO) -> Iterator[None]:
    """A terminal that gives keys at once, without echo; put back afterwards."""
    if not stream.isatty():
        yield
        return
    before = termios.tcgetattr(stream)
    atexit.register(termios.tcsetattr, stream, termios.TCSADRAIN, before)
    tty.setcbreak(stream)
    yield
