"""Action goals in place of a stream: when an action's or a service's number of the policy's action becomes a goal.

A `GoalSender` sends the newest goal alone, cancels what is under way when the robot is to hold, and is a check of the
supervisor's: while there is trouble with a goal the robot holds, with that reason, and where it lasts it stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from real_robot.contract.channels import GoalConfig
from real_robot.transports.action_types import ACTIONS, SERVICES, GoalMessage, ServiceDone
from real_robot.transports.actions import (
    ABORTED,
    ANSWER_SECONDS,
    LOST,
    PENDING,
    SUCCEEDED,
    ActionClient,
    Answer,
    Goal,
    GraphTransport,
    ServiceClient,
)
from real_robot.transports.messages import Message
from real_robot.types import RobotObservation

CLOSE_SECONDS = 0.5  # that a goal has to end when the robot is left


class GoalSender:
    """One action's goals; the supervisor's `StateCheck` of them.

    A goal that was reached, or a grip that stalled, is not canceled by a hold: the controller goes on holding it.

    Args:
        topic: the action's name, for reasons.
    """

    name = "goal"

    def __init__(
        self, topic: str, client: ActionClient, config: GoalConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._topic, self._client, self._config, self._clock = topic, client, config, clock
        self._goal: Goal | None = None
        self._numbers: np.ndarray | None = None  # of the last goal
        self._sent_at = float("-inf")
        self._canceled: list[tuple[Goal, float]] = []  # those that the server still has to end, and since when

    @property
    def ready(self) -> bool:
        """Whether the server is there."""
        return self._client.ready

    def follow(self, message: GoalMessage) -> None:
        """Send what is wanted now as a goal, unless it is the last goal, as it were, or something is wrong."""
        now = self._clock()
        is_same = self._numbers is not None and np.abs(message.numbers - self._numbers).max() <= self._config.change
        if is_same or now - self._sent_at < self._config.period or self._find_trouble() is not None:
            return
        self._goal = self._client.send(message)
        self._numbers, self._sent_at = message.numbers, now

    def halt(self) -> None:
        """Cancel the goal that is under way; what is wanted after it is sent anew."""
        goal = self._goal
        if goal is None or goal.is_over:
            return
        self._client.cancel(goal)
        self._canceled.append((goal, self._clock()))
        self._goal = self._numbers = None

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        """As `StateCheck.trouble`: the server, or the newest goal. One that nobody answers in time is given up."""
        return self._find_trouble()

    def _find_trouble(self) -> str | None:
        now, goal, limit = self._clock(), self._goal, self._config.timeout
        if not self._client.ready:
            if goal is not None and not goal.is_over:
                goal.end(LOST, text="the server went away")
            return f"{self._topic}: no server answers"
        self._canceled = [(canceled, since) for canceled, since in self._canceled if not canceled.is_over]
        if self._canceled and now - self._canceled[0][1] > limit:
            return f"{self._topic}: the server has not canceled a goal for {limit:g} s"
        if goal is not None and goal.status == PENDING and now - self._sent_at > limit:
            self._client.cancel(goal)
            goal.end(LOST, text=f"no answer for {limit:g} s")
        if goal is None or not goal.is_over or goal.status == SUCCEEDED or self._is_grip(goal):
            return None
        return f"{self._topic}: goal {goal.status}" + (f": {goal.text}" if goal.text else "")

    def _is_grip(self, goal: Goal) -> bool:
        stalled = bool(getattr(goal.result, "stalled", False))
        allowed = self._config.aborted == "fine" or (self._config.aborted == "stalled" and stalled)
        return goal.status == ABORTED and allowed

    def restart(self) -> None:
        """Forget what went wrong, and what was sent: a person has reset, or an episode begins."""
        self.halt()
        self._goal = self._numbers = None
        self._canceled.clear()

    def close(self) -> None:
        """Cancel, and give the server a moment to hear it."""
        self.halt()
        deadline = self._clock() + CLOSE_SECONDS
        while not all(goal.is_over for goal, _ in self._canceled) and self._clock() < deadline:
            time.sleep(0.01)


class ServiceSwitch:
    """A service that takes a switch's state, std_srvs/SetBool, as if it were an action; there is nothing to cancel."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    @property
    def ready(self) -> bool:
        return self._client.ready

    def send(self, goal: Message) -> Goal:
        sent = Goal("")

        def answered(answer: Answer) -> None:
            if isinstance(answer, str):
                sent.end(ABORTED, text=answer)
            else:
                assert isinstance(answer, ServiceDone)
                sent.end(SUCCEEDED if answer.success else ABORTED, answer)

        self._client.call(goal, answered)
        return sent

    def cancel(self, goal: Goal) -> None:
        """Nothing: what was switched stays."""
        goal.end(LOST)


def open_goals(graph: GraphTransport, name: str, kind: str, config: GoalConfig) -> GoalSender:
    """The sender of an action's or a switching service's goals."""
    if kind in ACTIONS:
        return GoalSender(name, graph.action(name, ACTIONS[kind]), config)
    return GoalSender(name, ServiceSwitch(graph.service(name, SERVICES[kind])), config)


def call_and_wait(client: ServiceClient, name: str, request: Message, seconds: float = ANSWER_SECONDS) -> str | None:
    """Call a service and wait. Returns None when it succeeded, else why not."""
    deadline = time.monotonic() + seconds
    while not client.ready:
        if time.monotonic() > deadline:
            return f"service {name}: no server answers within {seconds:g} s"
        time.sleep(0.05)
    got: list[Answer] = []
    done = threading.Event()

    def answered(answer: Answer) -> None:
        got.append(answer)
        done.set()

    client.call(request, answered)
    if not done.wait(max(0.1, deadline - time.monotonic())):
        return f"service {name}: no answer within {seconds:g} s"
    if isinstance(got[0], str):
        return got[0]
    assert isinstance(got[0], ServiceDone)
    return None if got[0].success else f"service {name} refused: {got[0].message or 'no reason given'}"
