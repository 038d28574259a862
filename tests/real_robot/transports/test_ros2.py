"""DDS at wire level: topics under ROS 2's names between two processes, and bytes equal to rosbags' CDR.

One side is our transport; the other is plain cyclonedds, with types written out by hand from ROS 2's message
definitions and with cyclonedds' own encoder. It is not a test with ROS 2 itself.
"""

# Without `from __future__ import annotations`: cyclonedds reads the annotations of its types.

import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from processes import LOOPBACK, ROOT, until

pytest.importorskip("cyclonedds", reason="cyclonedds is not installed: pip install '.[ros]'")
pytest.importorskip("rosbags", reason="rosbags is not installed: pip install '.[ros]'")

from cyclonedds.core import Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import float32, float64, int32, sequence, uint8, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from test_messages import EXAMPLES

from real_robot.transports.base import QosConfig
from real_robot.transports.configs import Ros2Config
from real_robot.transports.messages import (
    Bool,
    CompressedImage,
    JointGroupCommand,
    JointSingleCommand,
    JointState,
    Message,
    MessageError,
    TwistStamped,
    WrenchStamped,
)
from real_robot.transports.ros.typestore import decode_cdr, encode_cdr, store_of

DISTRO = "humble"


@dataclass
class Time(IdlStruct, typename="builtin_interfaces.msg.dds_.Time_"):
    sec: int32
    nanosec: uint32


@dataclass
class Header(IdlStruct, typename="std_msgs.msg.dds_.Header_"):
    stamp: Time
    frame_id: str


@dataclass
class DdsJointState(IdlStruct, typename="sensor_msgs.msg.dds_.JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class DdsCompressedImage(IdlStruct, typename="sensor_msgs.msg.dds_.CompressedImage_"):
    header: Header
    format: str
    data: sequence[uint8]


@dataclass
class Vector3(IdlStruct, typename="geometry_msgs.msg.dds_.Vector3_"):
    x: float64
    y: float64
    z: float64


@dataclass
class Twist(IdlStruct, typename="geometry_msgs.msg.dds_.Twist_"):
    linear: Vector3
    angular: Vector3


@dataclass
class DdsTwistStamped(IdlStruct, typename="geometry_msgs.msg.dds_.TwistStamped_"):
    header: Header
    twist: Twist


@dataclass
class Wrench(IdlStruct, typename="geometry_msgs.msg.dds_.Wrench_"):
    force: Vector3
    torque: Vector3


@dataclass
class DdsWrenchStamped(IdlStruct, typename="geometry_msgs.msg.dds_.WrenchStamped_"):
    header: Header
    wrench: Wrench


@dataclass
class DdsJointGroupCommand(IdlStruct, typename="interbotix_xs_msgs.msg.dds_.JointGroupCommand_"):
    name: str
    cmd: sequence[float32]


@dataclass
class DdsJointSingleCommand(IdlStruct, typename="interbotix_xs_msgs.msg.dds_.JointSingleCommand_"):
    name: str
    cmd: float32


def vector(values: np.ndarray) -> Vector3:
    return Vector3(*map(float, values))


def by_hand(message: Message) -> Any:
    """The message as cyclonedds' own sample."""
    header = Header(Time(message.stamp // 10**9, message.stamp % 10**9), message.frame_id)
    if isinstance(message, JointState):
        numbers = (message.position.tolist(), message.velocity.tolist(), message.effort.tolist())
        return DdsJointState(header, list(message.name), *numbers)
    if isinstance(message, CompressedImage):
        return DdsCompressedImage(header, message.format, list(message.data))
    if isinstance(message, JointGroupCommand):
        return DdsJointGroupCommand(message.name, [float(v) for v in message.cmd])
    if isinstance(message, JointSingleCommand):
        return DdsJointSingleCommand(message.name, message.cmd)
    if isinstance(message, WrenchStamped):
        return DdsWrenchStamped(header, Wrench(vector(message.force), vector(message.torque)))
    assert isinstance(message, TwistStamped)
    return DdsTwistStamped(header, Twist(vector(message.linear), vector(message.angular)))


STAMP = {"stamp": 1_700_000_000_123_456_789, "frame_id": "base_link"}
CASES = [
    (
        "joint_states",
        DdsJointState,
        JointState(
            **STAMP, name=("a", "joint_2"), position=np.array([0.5, -1]), velocity=np.zeros(0), effort=np.ones(2)
        ),
    ),
    (
        "camera/image/compressed",
        DdsCompressedImage,
        CompressedImage(**STAMP, format="jpeg", data=bytes(range(255)) * 119),
    ),
    (
        "servo/twist",
        DdsTwistStamped,
        TwistStamped(**STAMP, linear=np.array([0.1, 0, -2]), angular=np.array([3, 4, 5.5])),
    ),
    (
        "wrench",
        DdsWrenchStamped,
        WrenchStamped(**STAMP, force=np.array([30, 0, -2.5]), torque=np.array([0.1, 4, -5.5])),
    ),
    ("arm/commands", DdsJointGroupCommand, JointGroupCommand(name="arm", cmd=np.array([0.5, -1.25]))),
    ("gripper/command", DdsJointSingleCommand, JointSingleCommand(name="gripper", cmd=0.125)),
]
ECHO = """
import sys, time
from real_robot.transports.messages import (
    CompressedImage, JointGroupCommand, JointSingleCommand, JointState, TwistStamped, WrenchStamped)
from real_robot.transports.base import QosConfig
from real_robot.transports.configs import Ros2Config
transport, qos = Ros2Config(domain=int(sys.argv[1])).open(), QosConfig(depth=10)
for topic, kind in (("joint_states", JointState), ("camera/image/compressed", CompressedImage),
                    ("servo/twist", TwistStamped), ("wrench", WrenchStamped), ("arm/commands", JointGroupCommand),
                    ("gripper/command", JointSingleCommand)):
    transport.subscribe(f"/{topic}", kind, qos, transport.advertise(f"/{topic}_back", kind, qos))
print("ready", flush=True)
sys.stdin.read()
transport.close()
"""


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_survives_cdr(message: Message) -> None:
    again = decode_cdr(encode_cdr(message, DISTRO), type(message), DISTRO)
    np.testing.assert_equal(again.tree(), message.tree())


@pytest.mark.parametrize("data", [b"", b"\x00\x01\x00\x00", bytes(range(40)), b"\x00\x01\x00\x00" + b"\xff" * 60])
def test_damaged_cdr_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_cdr(data, JointState, DISTRO)


@pytest.mark.parametrize(("topic", "kind", "message"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_our_bytes_are_those_of_two_other_encoders(topic: str, kind: type, message: Message) -> None:
    """cyclonedds' encoder, from types written by hand, and rosbags' on its own message classes."""
    ours = encode_cdr(message, DISTRO)
    assert by_hand(message).serialize(use_version_2=False) == ours
    store, name = store_of(DISTRO), f"{message.TYPE.replace('/', '/msg/')}"
    assert bytes(store.serialize_cdr(store.deserialize_cdr(ours, name), name)) == ours


@pytest.mark.live
def test_between_two_processes_under_ros_2s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain cyclonedds writes; our transport, in another process, reads and sends on; plain cyclonedds reads that."""
    monkeypatch.setenv("CYCLONEDDS_URI", LOOPBACK)
    domain = 1 + time.time_ns() % 200
    qos = Qos(
        Policy.Reliability.Reliable(duration(milliseconds=100)),
        Policy.History.KeepLast(10),
        Policy.DataRepresentation(use_cdrv0_representation=True),
    )
    participant = DomainParticipant(domain)
    echo = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(domain)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        ends = [
            (
                DataWriter(participant, Topic(participant, f"rt/{topic}", kind), qos),
                DataReader(participant, Topic(participant, f"rt/{topic}_back", kind), qos),
            )
            for topic, kind, _ in CASES
        ]
        for (topic, _, message), (writer, reader) in zip(CASES, ends, strict=True):
            until(lambda w=writer: w.get_matched_subscriptions(), f"a reader of {topic}", 30)
            until(lambda r=reader: r.get_matched_publications(), f"a writer of {topic}_back", 30)
            writer.write(by_hand(message))
            (back,) = until(lambda r=reader: r.take(1), f"{topic}'s return", 30)
            assert back == by_hand(message)
            assert back.serialize(use_version_2=False) == encode_cdr(message, DISTRO)
    finally:
        assert echo.stdin is not None
        echo.stdin.close()
        try:
            echo.wait(20)
        finally:
            echo.kill()
    assert echo.returncode == 0


def test_a_transport_that_is_closed_has_no_threads_and_has_left_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its process goes on: a recording may be finished there."""
    monkeypatch.setenv("CYCLONEDDS_URI", LOOPBACK)
    config = Ros2Config(domain=1 + time.time_ns() % 200)
    transport, other = config.open(), config.open()
    transport.subscribe("/joint_states", JointState, QosConfig(), lambda message: None)
    publish = transport.advertise("/button", Bool, QosConfig())
    assert not transport.has_listener("/button") and transport.fault is None
    until(lambda: other.other_publishers("/button"), "the publisher", 30)  # type: ignore[attr-defined]
    transport.close()
    transport.close()
    assert not any(thread.is_alive() for thread in transport._threads)  # type: ignore[attr-defined]
    until(lambda: not other.other_publishers("/button"), "its end", 30)  # type: ignore[attr-defined]
    publish(Bool(data=True))
    other.close()
