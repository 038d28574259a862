"""A node that plays a robot's drivers: publishes and listens as it is told, and prints what it is commanded.

It leaves the graph when its standard input ends.

    python played_robot.py TRANSPORT.json GRAPH.json

GRAPH: {"publish": [...], "listen": [{"topic", "type"}], "advertise": [the same], "actions": [{"name", "type"}]}. Of
actions only their servers' listening for goals is played, which is what others can see. Each that is published is
{"topic", "type", "rate", "frame", "skew" (seconds that its clock is ahead), "reliability"} and what its type needs:
`joints` and `values`; a picture's `size` [height, width] and `encoding`; a pose's `values`, position, then
axis-angle; a wrench's, force, then torque.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from real_robot.bridge.codec import encode_image, to_quaternion
from real_robot.transports.base import QosConfig, Transport
from real_robot.transports.configs import Ros2Config
from real_robot.transports.messages import (
    MESSAGES,
    Bool,
    CompressedImage,
    Float64MultiArray,
    Image,
    JointState,
    Message,
    PoseStamped,
    String,
    WrenchStamped,
)
from real_robot.transports.rclpy_node import RclpyConfig
from real_robot.transports.ros1 import Ros1Config
from vla_rl.config import validate

_NONE = np.zeros(0)


def message_of(entry: dict[str, Any]) -> Callable[[int], Message]:
    """A function from a stamp to the message that is sent then."""
    kind, frame = MESSAGES[entry["type"]], entry.get("frame", "")
    if kind in (Image, CompressedImage):
        return _picture_of(entry)
    values = np.array(entry.get("values", [0.0] * len(entry.get("joints", ()))), np.float64)
    if kind is JointState:
        names = tuple(entry["joints"])
        return lambda stamp: JointState(
            stamp=stamp, frame_id=frame, name=names, position=values, velocity=_NONE, effort=_NONE
        )
    if kind is PoseStamped:
        turned = to_quaternion(values[3:])
        return lambda stamp: PoseStamped(stamp=stamp, frame_id=frame, position=values[:3], orientation=turned)
    if kind is WrenchStamped:
        return lambda stamp: WrenchStamped(stamp=stamp, frame_id=frame, force=values[:3], torque=values[3:])
    if kind is Float64MultiArray:
        return lambda stamp: Float64MultiArray(data=values)
    return lambda stamp: Bool(data=bool(values[0])) if kind is Bool else String(data="go")


def _picture_of(entry: dict[str, Any]) -> Callable[[int], Message]:
    height, width = entry["size"]
    frame, encoding = entry.get("frame", ""), entry.get("encoding", "rgb8")
    slope = np.linspace(0, 255, width).astype(np.uint8)  # cheap to decode
    picture = np.ascontiguousarray(np.broadcast_to(slope[None, :, None], (height, width, 3)))
    if entry["type"] == CompressedImage.TYPE:
        data = encode_image(picture, "jpeg", 60)
        return lambda stamp: CompressedImage(stamp=stamp, frame_id=frame, format="jpeg", data=data)
    shape: dict[str, Any] = {"height": height, "width": width, "step": 3 * width, "data": picture.tobytes()}
    return lambda stamp: Image(stamp=stamp, frame_id=frame, encoding=encoding, **shape)


class Stream:
    """One topic that is published at its rate."""

    def __init__(self, transport: Transport, entry: dict[str, Any]) -> None:
        qos = QosConfig(reliability=entry.get("reliability", "reliable"))
        self._publish = transport.advertise(entry["topic"], MESSAGES[entry["type"]], qos)
        self._make = message_of(entry)
        self._period = 1 / entry.get("rate", 30)
        self._skew = round(entry.get("skew", 0.0) * 1e9)
        self._due = time.monotonic()

    def step(self) -> None:
        if time.monotonic() >= self._due:
            self._due = max(self._due + self._period, time.monotonic() - self._period)
            self._publish(self._make(time.time_ns() + self._skew))


def announce(transport: dict[str, Any], name: str, kind: str, node: Any = None) -> Any:
    """Listen for goals as an action's server does, under ROS's own names of its topic and type."""
    if transport["kind"] == "ros1":
        import rospy

        from real_robot.transports.ros.definitions import ros1_classes

        return rospy.Subscriber(f"{name}/goal", ros1_classes()[f"{kind}ActionGoal"], lambda m: print("commanded", m))
    if transport["kind"] == "rclpy":  # ROS 2's environment of the tests has no control_msgs: a service by that name
        from std_srvs.srv import Trigger

        return node.create_service(Trigger, f"{name}/_action/send_goal", lambda *_: print("commanded", flush=True))
    from cyclonedds.domain import DomainParticipant
    from cyclonedds.idl import make_idl_struct
    from cyclonedds.idl.types import sequence, uint8
    from cyclonedds.sub import DataReader
    from cyclonedds.topic import Topic

    package, _, short = kind.partition("/")
    typename = f"{package}.action.dds_.{short}_SendGoal_Request_"
    fields: Any = {"data": sequence[uint8]}
    request = make_idl_struct(f"{short}_SendGoal_Request_", typename, fields)
    participant = DomainParticipant(transport["domain"])
    return DataReader(participant, Topic(participant, f"rq{name}/_action/send_goalRequest", request)), participant


def main() -> None:
    values, graph = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    configs: dict[str, type[Ros1Config | Ros2Config | RclpyConfig]] = {
        "ros1": Ros1Config, "ros2": Ros2Config, "rclpy": RclpyConfig,
    }  # fmt: skip
    transport = validate(configs[values["kind"]], values).open()
    streams = [Stream(transport, entry) for entry in graph["publish"]]
    for entry in graph["listen"]:
        transport.subscribe(
            entry["topic"], MESSAGES[entry["type"]], QosConfig(), lambda m: print("commanded", m, flush=True)
        )
    for entry in graph.get("advertise", ()):
        transport.advertise(entry["topic"], MESSAGES[entry["type"]], QosConfig())
    node = getattr(transport, "node", None)
    kept = [announce(values, entry["name"], entry["type"], node) for entry in graph.get("actions", ())]
    threading.Thread(target=lambda: (sys.stdin.read(), kept.append(None)), daemon=True).start()
    print("ready", flush=True)
    while None not in kept:
        for stream in streams:
            stream.step()
        time.sleep(0.002)
    transport.close()


if __name__ == "__main__":
    main()
