"""The rosbridge transport: roslibpy, for robots that run rosbridge_server in front of ROS 1 or ROS 2.

JSON, so pictures travel as base64: keep them compressed and small.
"""

from __future__ import annotations

import base64
import logging
from typing import Any

import numpy as np
import roslibpy

from real_robot.transports.base import GraphConnection, Handler, Publisher, QosConfig, TransportError
from real_robot.transports.messages import Message, MessageError

_log = logging.getLogger(__name__)
CONNECT_TIMEOUT = 10  # seconds to wait for the first connection
_ROSAPI_TIMEOUT = 3  # seconds
_BYTES = {"sensor_msgs/Image", "sensor_msgs/CompressedImage"}


class RosbridgeTransport(GraphConnection):
    """A client of a rosbridge server. roslibpy connects again by itself, and subscribes anew.

    A bridge that hangs, in place of dying, is not noticed here: only the age of messages tells, which
    the contract's `max_age` and the supervisor watch.

    Raises:
        TransportError: no server answers in time.
    """

    def __init__(self, url: str, ros: int) -> None:
        super().__init__(f"rosbridge {url}")
        self._url, self._ros_version = url, ros
        if ros == 1:
            self.discovery = 1.0  # the master knows all
        self._ros = roslibpy.Ros(url) if "://" in url else roslibpy.Ros(host=url, port=9090)
        self._topics: list[roslibpy.Topic] = []
        self._closed = False
        try:
            self._ros.run(timeout=CONNECT_TIMEOUT)
        except Exception as error:  # roslibpy wraps Twisted's failures in several classes
            self._ros.close()
            raise TransportError(
                f"no rosbridge server answers at {url} within {CONNECT_TIMEOUT} s ({error}). "
                "Start it with `roslaunch rosbridge_server rosbridge_websocket.launch` (ROS 2: `ros2 launch`)"
            ) from error

    @property
    def fault(self) -> str | None:
        return None if self._ros.is_connected else f"the rosbridge server at {self._url} is gone"

    def has_listener(self, topic: str) -> bool:
        """Not known: the bridge listens on the robot's behalf."""
        return True

    def other_publishers(self, topic: str) -> list[str] | None:
        """The nodes that rosapi knows, but the bridge's own, which publishes for all of its clients.

        None where rosapi does not run.
        """
        kind = "rosapi/Publishers" if self._ros_version == 1 else "rosapi_msgs/srv/Publishers"
        service = roslibpy.Service(self._ros, "/rosapi/publishers", kind)
        try:
            answer = service.call(roslibpy.ServiceRequest({"topic": f"/{topic.lstrip('/')}"}), timeout=_ROSAPI_TIMEOUT)
        except Exception as error:  # roslibpy raises several classes, of its own and of Twisted
            _log.warning("rosapi does not say who publishes on %s: %s", topic, error)
            return None
        return [node for node in (answer or {}).get("publishers", []) if not node.startswith("/rosbridge")]

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        def read(tree: dict[str, Any]) -> Message:
            if message_type.TYPE in _BYTES and isinstance(tree.get("data"), str):
                try:
                    tree = {**tree, "data": base64.b64decode(tree["data"], validate=True)}
                except ValueError as error:
                    raise MessageError(f"{message_type.TYPE}: {error}") from None
            return message_type.from_tree(tree)

        # queue_length 1 and no throttle: the newest message, or a slow link builds up a minute of old ones.
        opened = roslibpy.Topic(
            self._ros, topic, self._type_of(message_type), queue_length=qos.depth, queue_size=qos.depth
        )
        opened.subscribe(self._receiver(topic, read, handler))
        self._topics.append(opened)

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        opened = roslibpy.Topic(
            self._ros,
            topic,
            self._type_of(message_type),
            latch=qos.durability == "transient_local",
            queue_size=qos.depth,
        )
        opened.advertise()
        self._topics.append(opened)

        def publish(message: Message) -> None:
            # While the bridge is away roslibpy would keep commands, and send them late.
            if self._ros.is_connected:
                opened.publish(roslibpy.Message(json_tree(message.tree(), self._ros_version)))

        return publish

    def _type_of(self, message_type: type[Message]) -> str:
        return message_type.TYPE if self._ros_version == 1 else message_type.TYPE.replace("/", "/msg/")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for topic in self._topics:
            (topic.unadvertise if topic.is_advertised else topic.unsubscribe)()
        self._ros.close()


def json_tree(tree: Any, ros: int) -> Any:
    """A message's tree as rosbridge's JSON: bytes in base64, times with the names of that ROS."""
    if isinstance(tree, dict):
        if ros == 1 and set(tree) == {"sec", "nanosec"}:
            return {"secs": tree["sec"], "nsecs": tree["nanosec"]}
        return {key: json_tree(value, ros) for key, value in tree.items()}
    if isinstance(tree, list):
        return [json_tree(item, ros) for item in tree]
    if isinstance(tree, bytes):
        return base64.b64encode(tree).decode()
    return tree.tolist() if isinstance(tree, np.ndarray) else tree
