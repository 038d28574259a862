"""The ROS 1 transport: rospy, from a ROS installation or from the packages of `vla-rl robot install`."""

# pyright: reportMissingImports=false
# (rospy comes from ROS 1's packages, not from PyPI.)

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from real_robot.transports.action_types import ActionType, ServiceType
from real_robot.transports.actions import Answer, TopicActionClient
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
from real_robot.transports.messages import Message, MessageError, Tree
from real_robot.transports.ros.definitions import ROS1_ACTIONS, ros1_classes
from real_robot.transports.ros.install import enable
from real_robot.transports.ros.master import is_gone, master_pid, service_uri, topic_ends

_log = logging.getLogger(__name__)
CHECK_PERIOD = 0.5  # seconds between looks whether the master answers


class Ros1Config(TransportConfig):
    """ROS 1 through rospy."""

    kind: Literal["ros1"] = "ros1"
    master: str = Field(default="", description="ROS_MASTER_URI; empty takes it from the environment.")
    host: str = Field(
        default="", description="ROS_IP, this machine's address for the others; empty takes it from the environment."
    )

    def open(self, role: str = "client") -> Transport:
        """Connect as a node that is named after what it does; see `Ros1Transport`."""
        return Ros1Transport(self, role)


class Ros1Transport(GraphConnection):
    """A rospy node. rospy allows one node a process, for the process's life.

    rospy does not notice that the master died: open connections go on, new ones never come. So the
    master is asked every `CHECK_PERIOD`; while it is away `fault` says so, and when another one
    comes up all topics are registered with it anew.

    Raises:
        RosInstallError: rospy is not installed.
        TransportError: no master answers, or this process has been a node before.
    """

    _used = False
    discovery = 1.0  # the master knows all

    def __init__(self, config: Ros1Config, role: str) -> None:
        enable()
        if config.master:
            os.environ["ROS_MASTER_URI"] = config.master
        if config.host:
            os.environ["ROS_IP"] = config.host
        self._uri = os.environ.get("ROS_MASTER_URI", "http://localhost:11311")
        super().__init__(f"ros1 {self._uri}")
        self._master = master_pid(self._uri)
        if self._master is None:
            raise TransportError(
                f"no ROS master answers at {self._uri}. Start one (roscore; without ROS "
                "`vla-rl robot sim --master only`), or set transport.master or ROS_MASTER_URI"
            )
        if Ros1Transport._used:
            raise TransportError("rospy allows one node a process, and this process has had its own")
        Ros1Transport._used = True
        import rospy

        rospy.init_node(node_name(role), disable_signals=True)
        self._rospy = rospy
        self._fault: str | None = None
        self._subscriptions: list[tuple[str, type[Message], QosConfig, Handler]] = []
        self._publishers: dict[str, tuple[type[Message], QosConfig]] = {}
        self._open_subscribers: list[Any] = []
        self._open_publishers: dict[str, Any] = {}
        self._services: list[Ros1Service] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def fault(self) -> str | None:
        return self._fault

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        with self._lock:
            self._subscriptions.append((topic, message_type, qos, handler))
            self._open_subscribers.append(self._open_subscriber(topic, message_type, qos, handler))

    def _open_subscriber(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> Any:
        receive = self._receiver(topic, lambda native: message_type.from_tree(tree_of(native)), handler)
        # The buffer must hold a whole queue of messages, or the newest is stuck behind old ones.
        return self._rospy.Subscriber(
            topic, native_class(message_type), receive, queue_size=qos.depth, buff_size=2**24, tcp_nodelay=True
        )

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        with self._lock:
            self._publishers[topic] = (message_type, qos)
            self._open_publishers[topic] = self._open_publisher(topic, message_type, qos)

        def publish(message: Message) -> None:
            try:
                self._open_publishers[topic].publish(native_of(message))
            except self._rospy.ROSException as error:
                if not self._closing.is_set():
                    _log.warning("%s: not published: %s", topic, error)

        return publish

    def has_listener(self, topic: str) -> bool:
        return self._open_publishers[topic].get_num_connections() > 0

    def other_publishers(self, topic: str) -> list[str] | None:
        """The nodes that the master knows, but those whose process is gone: the master keeps them."""
        try:
            publishers, _, _ = topic_ends(self._uri)
        except OSError as error:
            _log.warning("who publishes on %s: %s", topic, error)
            return None
        nodes = publishers.get(self._rospy.resolve_name(topic), [])
        return [node for node in nodes if node != self._rospy.get_name() and not is_gone(self._uri, node)]

    def survey(self) -> list[Endpoint]:
        """See `Surveyor`. A topic that two nodes hold for two types has that of the one that came last."""
        try:
            publishers, subscribers, types = topic_ends(self._uri)
        except OSError as error:
            raise TransportError(str(error)) from error
        own = self._rospy.get_name()
        return [
            Endpoint(topic, types.get(topic, ""), node, publishes)
            for ends, publishes in ((publishers, True), (subscribers, False))
            for topic, nodes in ends.items()
            for node in nodes
            if node != own
        ]

    def _open_publisher(self, topic: str, message_type: type[Message], qos: QosConfig) -> Any:
        return self._rospy.Publisher(
            topic,
            native_class(message_type),
            queue_size=qos.depth,
            latch=qos.durability == "transient_local",
            tcp_nodelay=True,
        )

    def action(self, name: str, action: ActionType) -> TopicActionClient:
        """A client of that actionlib server.

        Raises:
            TransportError: ROS 1 has no such action.
        """
        if action.name not in ROS1_ACTIONS:
            raise TransportError(f"{name}: {action.name} is an action of ROS 2; ROS 1 has {', '.join(ROS1_ACTIONS)}")
        return TopicActionClient(self, name, action)

    def service(self, name: str, service: ServiceType) -> Ros1Service:
        """A client of that service."""
        client = Ros1Service(self._rospy, self._uri, name, service)
        self._services.append(client)
        return client

    def _watch(self) -> None:
        while not self._closing.wait(CHECK_PERIOD):
            for service in list(self._services):
                service.look()
            found = master_pid(self._uri)
            if found is None:
                self._fault = f"the ROS master at {self._uri} does not answer"
            elif found != self._master:
                _log.warning("another ROS master runs at %s; registering all topics again", self._uri)
                self._register_again()
                self._master, self._fault = found, None
            else:
                self._fault = None

    def _register_again(self) -> None:
        with self._lock:
            for opened in (*self._open_subscribers, *self._open_publishers.values()):
                opened.unregister()
            self._open_subscribers = [self._open_subscriber(*args) for args in self._subscriptions]
            self._open_publishers = {t: self._open_publisher(t, *args) for t, args in self._publishers.items()}

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._rospy.signal_shutdown("closed")


class Ros1Service:
    """A client of one service. rospy's calls block, so each has a thread; while one is under way others are refused."""

    def __init__(self, rospy: Any, uri: str, name: str, service: ServiceType) -> None:
        self._rospy, self._uri, self._name, self._type = rospy, uri, rospy.resolve_name(name), service
        package, _, short = service.name.partition("/")
        self._class = getattr(importlib.import_module(f"{package}.srv"), short)
        self._proxy = rospy.ServiceProxy(self._name, self._class)
        self._busy = threading.Lock()
        self.ready = False
        self.look()

    def look(self) -> None:
        """Ask the master whether the service is there."""
        self.ready = service_uri(self._uri, self._name) != ""

    def call(self, request: Message, answer: Callable[[Answer], None]) -> None:
        if not self._busy.acquire(blocking=False):
            answer(f"service {self._name} has not answered the last call")
            return

        def ask() -> None:
            try:
                native = self._proxy(_fill(self._class._request_class, request.tree()))
                got: Answer = self._type.response.from_tree(tree_of(native))
            except (self._rospy.ServiceException, self._rospy.ROSException, MessageError) as error:
                got = f"service {self._name}: {error}"
            finally:
                self._busy.release()
            answer(got)

        threading.Thread(target=ask, daemon=True, name=f"call {self._name}").start()


def native_class(message_type: type[Message]) -> Any:
    """rospy's class of a message type."""
    return _class_named(message_type.TYPE)


def _class_named(type_name: str) -> Any:
    """The class of an installed package, or for control_msgs, which Debian lacks, one made of its definition."""
    package, _, name = type_name.partition("/")
    try:
        return getattr(importlib.import_module(f"{package}.msg"), name)
    except ImportError:
        if type_name not in ros1_classes():
            raise
        return ros1_classes()[type_name]


def tree_of(native: Any) -> Any:
    """A rospy message as a tree (see `real_robot.transports.messages`)."""
    if hasattr(native, "secs"):
        return {"sec": native.secs, "nanosec": native.nsecs}
    if hasattr(native, "__slots__") and hasattr(native, "_slot_types"):
        return {name: tree_of(getattr(native, name)) for name in native.__slots__}
    if isinstance(native, list | tuple) and native and hasattr(native[0], "_slot_types"):
        return [tree_of(item) for item in native]
    return native


def native_of(message: Message) -> Any:
    """A message as rospy's own."""
    return _fill(native_class(type(message)), message.tree())


def _fill(kind: Any, tree: Tree) -> Any:
    native = kind()
    for name, type_name in zip(native.__slots__, native._slot_types, strict=True):
        if name not in tree:
            continue  # ROS 1's header has a sequence number, which rospy fills in.
        setattr(native, name, _native_value(type_name, tree[name], getattr(native, name)))
    return native


def _native_value(type_name: str, value: Any, default: Any) -> Any:
    if type_name in ("time", "duration"):
        return type(default)(value["sec"], value["nanosec"])
    if isinstance(value, Mapping):
        return _fill(type(default), dict(value))
    if "/" in type_name and type_name.endswith("[]"):
        kind = _class_named(type_name[:-2])
        return [_fill(kind, item) for item in value]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray) else value
