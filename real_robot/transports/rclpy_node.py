"""The rclpy transport: a node of ROS 2's graph, on a machine with ROS 2 installed and sourced, on any RMW.

Thin: what is said is decided above, what is on the wire below.
"""

# pyright: reportMissingImports=false
# (rclpy and the message packages come from ROS 2, not from PyPI.)

from __future__ import annotations

import array
import atexit
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from real_robot.transports.action_types import ActionType, ServiceType
from real_robot.transports.actions import LOST, REJECTED, ROS2_STATUS, Answer, Goal, read_part
from real_robot.transports.base import (
    Endpoint,
    GraphConnection,
    Handler,
    Publisher,
    QosConfig,
    Transport,
    TransportConfig,
    TransportError,
    node_name,
)
from real_robot.transports.messages import Message, Tree
from real_robot.transports.ros.definitions import ros2_packages

_log = logging.getLogger(__name__)
THREADS = 4  # that messages are read on


class RclpyConfig(TransportConfig):
    """ROS 2 through rclpy: needs ROS 2 installed and sourced, with a Python that is ours."""

    kind: Literal["rclpy"] = "rclpy"
    domain: int | None = Field(
        default=None, ge=0, le=232, description="ROS_DOMAIN_ID; null takes it from the environment."
    )

    def open(self, role: str = "client") -> Transport:
        """Connect as a node that is named after what it does; see `RclpyTransport`."""
        try:
            importlib.import_module("rclpy")
        except ImportError as error:
            raise TransportError(
                f"transport rclpy: {error}. Source a ROS 2 whose Python is this one (docs/ros.md); the transport ros2 "
                "needs none"
            ) from error
        return RclpyTransport(self, role)


class RclpyTransport(GraphConnection):
    """A node, and its executor on threads of its own. Signals stay ours: deploy brakes before it leaves the graph.

    Raises:
        TransportError: the node cannot be made.
    """

    def __init__(self, config: RclpyConfig, role: str) -> None:
        domain = os.environ.get("ROS_DOMAIN_ID", "0") if config.domain is None else config.domain
        super().__init__(f"dds {domain}")
        import rclpy
        from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
        from rclpy.executors import MultiThreadedExecutor
        from rclpy.signals import SignalHandlerOptions

        self._rclpy, self._group = rclpy, MutuallyExclusiveCallbackGroup
        self._began = not rclpy.ok()  # else somebody's process, who ends it
        try:
            if self._began:
                rclpy.init(domain_id=config.domain, signal_handler_options=SignalHandlerOptions.NO)
            self.node = rclpy.create_node(node_name(role))
        except Exception as error:  # rclpy raises errors of its C libraries
            raise TransportError(f"rclpy: the node cannot be made: {error}") from error
        self._publishers: dict[str, Any] = {}
        self._closed = False
        self._executor = MultiThreadedExecutor(num_threads=THREADS)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, daemon=True, name="rclpy")
        self._thread.start()
        atexit.register(self.close)  # a thread in rclpy while Python ends aborts the process

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except Exception as error:  # rclpy's ExternalShutdownException, and whatever a callback raises
            if not self._closed:
                _log.error("rclpy: the executor ended: %s", error)

    @property
    def fault(self) -> str | None:
        if self._closed or (self._thread.is_alive() and self._rclpy.ok()):
            return None
        return "rclpy was shut down, or its executor ended"

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        receive = self._receiver(topic, lambda native: message_type.from_tree(tree_of(native)), handler)
        # A group each: a slow picture does not hold up joint states, and no topic overtakes itself.
        kind = native_class(message_type.TYPE)
        self.node.create_subscription(kind, topic, receive, _qos_profile(qos), callback_group=self._group())

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        kind = native_class(message_type.TYPE)
        publisher = self._publishers[topic] = self.node.create_publisher(kind, topic, _qos_profile(qos))

        def publish(message: Message) -> None:
            if not self._closed:
                publisher.publish(fill(kind(), message.tree()))

        return publish

    def has_listener(self, topic: str) -> bool:
        return self._publishers[topic].get_subscription_count() > 0

    def other_publishers(self, topic: str) -> list[str] | None:
        """The node of each publisher there, but this one's: counted, since two nodes may be given one name."""
        found = [_full_name(end) for end in self.node.get_publishers_info_by_topic(topic)]
        own = self.node.get_fully_qualified_name()
        if topic in self._publishers and own in found:
            found.remove(own)
        return found

    def survey(self) -> list[Endpoint]:
        """See `Surveyor`. Servers of actions and services show what they listen to, as on the wire."""
        ends = []
        for topic, _ in self.node.get_topic_names_and_types():
            for publishes, found in (
                (True, self.node.get_publishers_info_by_topic(topic)),
                (False, self.node.get_subscriptions_info_by_topic(topic)),
            ):
                ends += [_endpoint(topic, end, publishes) for end in found]
        ours = self.node.get_fully_qualified_name()
        for name, types in self.node.get_service_names_and_types():
            ends.append(Endpoint(f"rq{name}Request", types[0].replace("/srv/", "/"), "a server", publishes=False))
        return [end for end in ends if end.node != ours]

    def service(self, name: str, service: ServiceType) -> RclpyService:
        """A client of that service."""
        return RclpyService(self.node, name, service)

    def action(self, name: str, action: ActionType) -> RclpyAction:
        """A client of that action."""
        from rclpy.action import ActionClient

        kind = native_class(action.name, "action")
        return RclpyAction(ActionClient(self.node, kind, name), kind, action)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._executor.shutdown(timeout_sec=1.0)
        self._thread.join(timeout=1.0)
        self.node.destroy_node()
        if self._began:
            self._rclpy.try_shutdown()


class RclpyService:
    """A client of one service."""

    def __init__(self, node: Any, name: str, service: ServiceType) -> None:
        self._name, self._type = name, service
        self._class = native_class(service.name, "srv")
        self._client = node.create_client(self._class, name)

    @property
    def ready(self) -> bool:
        return self._client.service_is_ready()

    def call(self, request: Message, answer: Callable[[Answer], None]) -> None:
        def answered(future: Any) -> None:
            try:
                answer(self._type.response.from_tree(tree_of(future.result())))
            except Exception as error:  # whatever rclpy raises in place of a result
                answer(f"service {self._name}: {error}")

        future = self._client.call_async(fill(self._class.Request(), request.tree()))
        future.add_done_callback(answered)


class RclpyAction:
    """A client of one action, around rclpy's `ActionClient`. `kind`: the action's class."""

    def __init__(self, client: Any, kind: Any, action: ActionType) -> None:
        self._client, self._kind, self._action = client, kind, action
        self._handles: dict[Goal, Any] = {}  # of goals under way that the server has accepted
        self._unwanted: set[Goal] = set()  # canceled before that
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        return self._client.server_is_ready()

    def send(self, goal: Message) -> Goal:
        sent = Goal("")

        def told(message: Any) -> None:
            sent.feedback = read_part(self._action.feedback, tree_of(message.feedback))

        native = fill(self._kind.Goal(), goal.tree())
        future = self._client.send_goal_async(native, feedback_callback=told)
        future.add_done_callback(lambda done: self._on_answer(sent, done))
        return sent

    def _on_answer(self, goal: Goal, future: Any) -> None:
        handle = _result(goal, future)
        if handle is None or not handle.accepted:
            with self._lock:
                self._unwanted.discard(goal)
            if not goal.is_over:
                goal.end(REJECTED)
            return
        with self._lock:
            goal.accept()
            self._handles[goal] = handle
            is_unwanted = goal in self._unwanted
            self._unwanted.discard(goal)
        handle.get_result_async().add_done_callback(lambda done: self._on_result(goal, done))
        if is_unwanted:
            handle.cancel_goal_async()

    def _on_result(self, goal: Goal, future: Any) -> None:
        with self._lock:
            self._handles.pop(goal, None)
        got = _result(goal, future)
        if got is not None:
            goal.end(ROS2_STATUS.get(got.status, LOST), read_part(self._action.result, tree_of(got.result)))

    def cancel(self, goal: Goal) -> None:
        """Ask for it, as soon as the server has accepted the goal."""
        with self._lock:
            handle = self._handles.get(goal)
            if handle is None and not goal.is_over:
                self._unwanted.add(goal)
        if handle is not None:
            handle.cancel_goal_async()


def _result(goal: Goal, future: Any) -> Any:
    """A future's result; None where it failed, and the goal with it."""
    try:
        return future.result()
    except Exception as error:  # whatever rclpy raises in place of a result
        goal.end(LOST, text=str(error))
        return None


# --- messages ------------------------------------------------------------------------------------------


def native_class(name: str, kind: str = "msg") -> Any:
    """ROS 2's class of a type, such as sensor_msgs/JointState; `kind`: msg, srv or action.

    Raises:
        TransportError: its package is not installed, or has no such type.
    """
    package, _, short = name.partition("/")
    try:
        return getattr(importlib.import_module(f"{package}.{kind}"), short)
    except (ImportError, AttributeError) as error:
        built = ", or vla-rl robot install, which builds it" if package in ros2_packages() else ""
        raise TransportError(
            f"{name}: {error}. Install its package: apt install ros-$ROS_DISTRO-{package.replace('_', '-')}{built}"
        ) from error


def tree_of(native: Any) -> Any:
    """A message of rclpy's as a tree (see `real_robot.transports.messages`)."""
    if hasattr(native, "get_fields_and_field_types"):
        return {name: tree_of(getattr(native, name)) for name in native.get_fields_and_field_types()}
    if isinstance(native, list | tuple) and native and hasattr(native[0], "get_fields_and_field_types"):
        return [tree_of(item) for item in native]
    return native


def fill(native: Any, tree: Tree) -> Any:
    """Put a tree into a message of rclpy's, and return it. Fields that the tree leaves out keep their defaults."""
    for name, type_name in native.get_fields_and_field_types().items():
        if name in tree:
            setattr(native, name, _native_value(type_name, tree[name], getattr(native, name)))
    return native


def _native_value(type_name: str, value: Any, default: Any) -> Any:
    if isinstance(value, Mapping):
        return fill(default, dict(value))
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        inner = native_class(type_name.removeprefix("sequence<").split("[")[0].split(">")[0].split(",")[0])
        return [fill(inner(), item) for item in value]
    if isinstance(value, bytes):
        return array.array("B", value)
    return value.tolist() if isinstance(value, np.ndarray) else value


# --- the graph -----------------------------------------------------------------------------------------


def _qos_profile(qos: QosConfig) -> Any:
    from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy

    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST,
        depth=qos.depth,
        reliability=getattr(ReliabilityPolicy, qos.reliability.upper()),
        durability=getattr(DurabilityPolicy, qos.durability.upper()),
    )


def _full_name(end: Any) -> str:
    return f"{end.node_namespace.rstrip('/')}/{end.node_name}"


def _endpoint(topic: str, end: Any, publishes: bool) -> Endpoint:
    reliability = str(getattr(end.qos_profile.reliability, "name", "")).lower()
    known = reliability if reliability in ("reliable", "best_effort") else ""
    return Endpoint(topic, end.topic_type.replace("/msg/", "/"), _full_name(end), publishes, known)
