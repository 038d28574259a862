"""A plain node of a ROS graph, for what plays a robot: rospy's or rclpy's own messages, nothing of ours between."""

# pyright: reportMissingImports=false
# (rospy and rclpy come from ROS, not from PyPI.)

from __future__ import annotations

import atexit
import importlib
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from real_robot.transports.ros.install import enable

GraphKind = Literal["ros1", "rclpy"]
Trigger = Callable[[], tuple[bool, str]]  # what a std_srvs/Trigger service does: success, message
_THREADS = 3  # that rclpy's callbacks run on


class SimNode(Protocol):
    """One node a process. Handlers get the graph's own messages, on threads of its own.

    Message types are named as in contracts, such as sensor_msgs/JointState.
    """

    def message(self, type_name: str, stamp: int | None = None, **fields: Any) -> Any:
        """A new message; `stamp`: of its header, nanoseconds since the epoch."""
        ...

    def publisher(self, topic: str, type_name: str, latched: bool = False) -> Any:
        """What has a method `publish(message)`."""
        ...

    def num_listeners(self, publisher: Any) -> int:
        """How many hear what is published there."""
        ...

    def subscribe(self, topic: str, type_name: str, handler: Callable[[Any], None], depth: int = 1) -> None:
        """Call `handler` with each message; `depth`: how many may wait for it."""
        ...

    def serve(self, name: str, act: Trigger) -> None:
        """A service of std_srvs/Trigger."""
        ...

    def stamp_of(self, message: Any) -> int:
        """When its header says that it was made, nanoseconds since the epoch."""
        ...

    @property
    def is_running(self) -> bool: ...

    def stop(self) -> None:
        """Leave the graph."""
        ...


def open_node(graph: GraphKind, name: str) -> SimNode:
    """The node of this process."""
    return Ros1Node(name) if graph == "ros1" else RclpyNode(name)


def _kind(type_name: str) -> Any:
    package, _, short = type_name.partition("/")
    return getattr(importlib.import_module(f"{package}.msg"), short)


class Ros1Node:
    """See `SimNode`. Its master is named by ROS_MASTER_URI."""

    def __init__(self, name: str) -> None:
        enable()
        import rospy

        self._rospy = rospy
        rospy.init_node(name, disable_signals=True)

    def message(self, type_name: str, stamp: int | None = None, **fields: Any) -> Any:
        made = _kind(type_name)(**fields)
        if stamp is not None:
            made.header.stamp = self._rospy.Time(*divmod(stamp, 10**9))
        return made

    def publisher(self, topic: str, type_name: str, latched: bool = False) -> Any:
        return self._rospy.Publisher(topic, _kind(type_name), queue_size=1, latch=latched, tcp_nodelay=True)

    def num_listeners(self, publisher: Any) -> int:
        return publisher.get_num_connections()

    def subscribe(self, topic: str, type_name: str, handler: Callable[[Any], None], depth: int = 1) -> None:
        self._rospy.Subscriber(topic, _kind(type_name), handler, queue_size=depth, tcp_nodelay=True)

    def serve(self, name: str, act: Trigger) -> None:
        from std_srvs.srv import Trigger as Native

        self._rospy.Service(name, Native, lambda _: act())

    def stamp_of(self, message: Any) -> int:
        return message.header.stamp.to_nsec()

    @property
    def is_running(self) -> bool:
        return not self._rospy.is_shutdown()

    def stop(self) -> None:
        self._rospy.signal_shutdown("stopped")


class RclpyNode:
    """See `SimNode`. Its domain is named by ROS_DOMAIN_ID."""

    def __init__(self, name: str) -> None:
        import rclpy
        from rclpy.executors import MultiThreadedExecutor
        from rclpy.signals import SignalHandlerOptions

        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        self.node = rclpy.create_node(name)
        executor = MultiThreadedExecutor(num_threads=_THREADS)
        executor.add_node(self.node)
        threading.Thread(target=executor.spin, daemon=True).start()
        self._stopped = threading.Event()

        @atexit.register
        def leave() -> None:
            executor.shutdown(timeout_sec=1.0)
            self.node.destroy_node()
            rclpy.try_shutdown()

    def message(self, type_name: str, stamp: int | None = None, **fields: Any) -> Any:
        made = _kind(type_name)(**fields)
        if stamp is not None:
            made.header.stamp.sec, made.header.stamp.nanosec = divmod(stamp, 10**9)
        return made

    def publisher(self, topic: str, type_name: str, latched: bool = False) -> Any:
        from rclpy.qos import DurabilityPolicy, QoSProfile

        durability = DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE
        return self.node.create_publisher(_kind(type_name), topic, QoSProfile(depth=1, durability=durability))

    def num_listeners(self, publisher: Any) -> int:
        return publisher.get_subscription_count()

    def subscribe(self, topic: str, type_name: str, handler: Callable[[Any], None], depth: int = 1) -> None:
        self.node.create_subscription(_kind(type_name), topic, handler, depth)

    def serve(self, name: str, act: Trigger) -> None:
        from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
        from std_srvs.srv import Trigger as Native

        def answer(_: Any, response: Any) -> Any:
            response.success, response.message = act()
            return response

        self.node.create_service(Native, name, answer, callback_group=MutuallyExclusiveCallbackGroup())

    def stamp_of(self, message: Any) -> int:
        return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec

    @property
    def is_running(self) -> bool:
        return not self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()
