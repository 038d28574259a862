"""Clients of actions and services that never block, and the two protocols by which goals travel: ROS 1's and ROS 2's.

A transport that has them is a `GraphTransport`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from real_robot.transports.action_types import ActionType, NamedMessage, ServiceType, message_named
from real_robot.transports.base import QosConfig, Transport, TransportError
from real_robot.transports.messages import Message, MessageError, Tree, to_time

PENDING, ACTIVE, SUCCEEDED, CANCELED, ABORTED, REJECTED, LOST = (
    *("pending", "active", "succeeded", "canceled", "aborted"),
    *("rejected", "lost"),
)
ANSWER_SECONDS = 10.0  # that a service has at the start
MAX_GOALS = 64  # that a client remembers
STATUS_AGE = 2.0  # seconds; a ROS 1 action server publishes its status five times a second
RESULT_GRACE = 1.0  # seconds that a ROS 1 result may come after the status that it has ended
_QUEUE = QosConfig(depth=10)


@dataclass(eq=False)
class Goal:
    """A goal that was sent. Its client's threads change it.

    Attributes:
        id: the action protocol's: text in ROS 1, 16 bytes in ROS 2.
        status: pending, active, succeeded, canceled, aborted, rejected or lost.
        text: the server's, or the result's, reason.
        result, feedback: the newest; None where none came.
    """

    id: str | bytes
    status: str = PENDING
    text: str = ""
    result: Message | None = None
    feedback: Message | None = None

    @property
    def is_over(self) -> bool:
        return self.status not in (PENDING, ACTIVE)

    def accept(self) -> None:
        """The server has taken it, unless it is over: given up."""
        if self.status == PENDING:
            self.status = ACTIVE

    def end(self, status: str, result: Message | None = None, text: str = "") -> None:
        """The goal is over, with its result."""
        self.result = result
        self.text = text or getattr(result, "error_string", "") or getattr(result, "message", "")
        self.status = status


class ActionClient(Protocol):
    """Sends goals to one action server. No method blocks."""

    @property
    def ready(self) -> bool:
        """Whether a server is there."""
        ...

    def send(self, goal: Message) -> Goal:
        """Send a goal; what becomes of it is in what is returned."""
        ...

    def cancel(self, goal: Goal) -> None:
        """Ask the server to cancel a goal; it is over when its status says so."""
        ...


Answer = Message | str  # a response, or why there is none


class ServiceClient(Protocol):
    """Calls one service."""

    @property
    def ready(self) -> bool:
        """Whether a server is there."""
        ...

    def call(self, request: Message, answer: Callable[[Answer], None]) -> None:
        """Ask, and return; `answer` is called on another thread, at most once. Nothing comes of a server that died."""
        ...


class GraphTransport(Transport, Protocol):
    """A transport that has services and actions beside topics."""

    def service(self, name: str, service: ServiceType) -> ServiceClient:
        """A client of that service."""
        ...

    def action(self, name: str, action: ActionType) -> ActionClient:
        """A client of that action."""
        ...


def graph_of(transport: Transport, what: str) -> GraphTransport:
    """The transport, as one that has services and actions.

    Raises:
        TransportError: it has none.
    """
    if not (hasattr(transport, "action") and hasattr(transport, "service")):
        raise TransportError(
            f"{what}: {type(transport).__name__} has no services and no actions; ros1, ros2 and rclpy have them"
        )
    return cast(GraphTransport, transport)


def read_part[M: Message](kind: type[M], tree: Any) -> M | None:
    """The typed message in an envelope, or None where it is not readable."""
    try:
        return kind.from_tree(tree)
    except MessageError:
        return None


class TopicActionClient:
    """A client of a ROS 1 action server (actionlib): topics goal, cancel, status, feedback, result under its name."""

    def __init__(
        self, transport: Transport, name: str, action: ActionType, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport, self._name, self._action, self._clock = transport, name, action, clock
        self._goals: dict[str, Goal] = {}
        self._ended: dict[str, float] = {}  # when the status first said so, where no result has come yet
        self._heard = float("-inf")
        status = message_named("actionlib_msgs/GoalStatusArray")
        transport.subscribe(f"{name}/status", status, _QUEUE, self._on_status)
        transport.subscribe(f"{name}/feedback", action.ros1("ActionFeedback"), _QUEUE, self._on_feedback)
        transport.subscribe(f"{name}/result", action.ros1("ActionResult"), _QUEUE, self._on_result)
        self._goal_type, self._cancel_type = action.ros1("ActionGoal"), message_named("actionlib_msgs/GoalID")
        self._publish_goal = transport.advertise(f"{name}/goal", self._goal_type, _QUEUE)
        self._publish_cancel = transport.advertise(f"{name}/cancel", self._cancel_type, _QUEUE)

    @property
    def ready(self) -> bool:
        """A server listens, and its status was heard not long ago: one that hangs keeps its connections."""
        listens = all(self._transport.has_listener(f"{self._name}/{part}") for part in ("goal", "cancel"))
        return listens and self._clock() - self._heard < STATUS_AGE

    def send(self, goal: Message) -> Goal:
        sent = Goal(uuid.uuid4().hex)
        remember(self._goals, sent.id, sent)
        now = to_time(time.time_ns())
        fields = {"header": {"stamp": now, "frame_id": ""}, "goal_id": {"stamp": now, "id": sent.id}}
        self._publish_goal(self._goal_type(fields={**fields, "goal": goal.tree()}))
        return sent

    def cancel(self, goal: Goal) -> None:
        """Ask for it; a stamp of zero means this goal alone."""
        self._publish_cancel(self._cancel_type(fields={"stamp": to_time(0), "id": goal.id}))

    def _on_status(self, message: Message) -> None:
        assert isinstance(message, NamedMessage)
        self._heard = now = self._clock()
        told = {status["goal_id"]["id"]: status for status in message.fields["status_list"]}
        for name, goal in list(self._goals.items()):
            status = told.get(name)
            if goal.is_over or (status is None and goal.status == PENDING):
                continue
            if status is None:
                goal.end(LOST, text="the action server no longer knows the goal")
            elif (ended := ROS1_STATUS.get(status["status"])) is None:
                if status["status"] != ROS1_PENDING:
                    goal.accept()
            elif now - self._ended.setdefault(name, now) > RESULT_GRACE:
                goal.end(ended, text=str(status["text"]))
                del self._ended[name]

    def _on_feedback(self, message: Message) -> None:
        assert isinstance(message, NamedMessage)
        if (goal := self._goals.get(message.fields["status"]["goal_id"]["id"])) is not None:
            goal.feedback = read_part(self._action.feedback, message.fields["feedback"])

    def _on_result(self, message: Message) -> None:
        assert isinstance(message, NamedMessage)
        status = message.fields["status"]
        goal = self._goals.get(status["goal_id"]["id"])
        self._ended.pop(status["goal_id"]["id"], None)
        if goal is not None and not goal.is_over:
            result = read_part(self._action.result, message.fields["result"])
            goal.end(ROS1_STATUS.get(status["status"]) or LOST, result, str(status["text"]))


ROS1_PENDING = 0
ROS1_STATUS = {2: CANCELED, 3: SUCCEEDED, 4: ABORTED, 5: REJECTED, 8: CANCELED, 9: LOST}  # the others are under way
ROS2_STATUS = {4: SUCCEEDED, 5: CANCELED, 6: ABORTED}


class ServiceActionClient:
    """A client of a ROS 2 action server: three services and the topic feedback under `<name>/_action`.

    The topic status is not read: the answer to get_result says how a goal ended.
    """

    def __init__(self, transport: GraphTransport, name: str, action: ActionType) -> None:
        self._action = action
        self._goals: dict[bytes, Goal] = {}
        self._unwanted: set[bytes] = set()  # canceled before the server had accepted them
        cancel = ("action_msgs/srv/CancelGoal_Request", "action_msgs/srv/CancelGoal_Response")
        self._send, self._result = (
            transport.service(
                f"{name}/_action/{service}",
                ServiceType(f"{action.name}_{part}", action.ros2(f"{part}_Request"), action.ros2(f"{part}_Response")),
            )
            for service, part in (("send_goal", "SendGoal"), ("get_result", "GetResult"))
        )
        self._cancel_request, response = map(message_named, cancel)
        self._cancel = transport.service(
            f"{name}/_action/cancel_goal", ServiceType("action_msgs/CancelGoal", self._cancel_request, response)
        )
        transport.subscribe(f"{name}/_action/feedback", action.ros2("FeedbackMessage"), _QUEUE, self._on_feedback)

    @property
    def ready(self) -> bool:
        return self._send.ready and self._result.ready and self._cancel.ready

    def send(self, goal: Message) -> Goal:
        sent_id = uuid.uuid4().bytes
        sent = Goal(sent_id)
        remember(self._goals, sent_id, sent)
        request = self._action.ros2("SendGoal_Request")(fields={"goal_id": _uuid(sent), "goal": goal.tree()})

        def answered(answer: Answer) -> None:
            if isinstance(answer, str) or not _fields(answer)["accepted"]:
                self._unwanted.discard(sent_id)
            if isinstance(answer, str):
                sent.end(LOST, text=answer)
            elif not _fields(answer)["accepted"]:
                sent.end(REJECTED)
            else:
                sent.accept()
                self._await_result(sent)
                if sent_id in self._unwanted:
                    self.cancel(sent)

        self._send.call(request, answered)
        return sent

    def _await_result(self, goal: Goal) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, str):
                goal.end(LOST, text=answer)
                return
            fields = _fields(answer)
            goal.end(ROS2_STATUS.get(fields["status"], LOST), read_part(self._action.result, fields["result"]))

        self._result.call(self._action.ros2("GetResult_Request")(fields={"goal_id": _uuid(goal)}), answered)

    def cancel(self, goal: Goal) -> None:
        """Ask for it, as soon as the server has accepted the goal: before, it does not know it."""
        assert isinstance(goal.id, bytes)
        if goal.status == PENDING:
            self._unwanted.add(goal.id)
            if goal.status == PENDING:
                return
        self._unwanted.discard(goal.id)
        info = {"goal_id": _uuid(goal), "stamp": to_time(0)}
        self._cancel.call(self._cancel_request(fields={"goal_info": info}), lambda answer: None)

    def _on_feedback(self, message: Message) -> None:
        fields = _fields(message)
        goal = self._goals.get(np.asarray(fields["goal_id"]["uuid"], np.uint8).tobytes())
        if goal is not None:
            goal.feedback = read_part(self._action.feedback, fields["feedback"])


def remember(goals: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep it, and forget the oldest of more than `MAX_GOALS`."""
    goals[key] = value
    while len(goals) > MAX_GOALS:
        goals.pop(next(iter(goals)), None)


def _uuid(goal: Goal) -> Tree:
    return {"uuid": goal.id}


def _fields(message: Message) -> Tree:
    assert isinstance(message, NamedMessage)
    return message.fields
