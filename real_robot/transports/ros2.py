"""The DDS transport: ROS 2's topic and type names and its encoding, through cyclonedds and rosbags, without ROS 2.

This is the wire level: what ROS 2 nodes send and hear over DDS. It is not part of the ROS 2 graph beyond topics,
services and actions: no node name, no parameters, and no type hash (rmw_cyclonedds of Iron and later warns).
Services, and so actions, are as rmw_cyclonedds sends them: the caller's identity stands before the fields. A robot on
rmw_fastrtps puts it beside them, where cyclonedds' Python does not reach: its services are refused, and topics are the
same for both.
Set CYCLONEDDS_URI for another network interface, as with rmw_cyclonedds.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import struct
import threading
import uuid
from collections.abc import Callable
from typing import Any

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication, BuiltinTopicDcpsSubscription
from cyclonedds.core import DDSException, InstanceState, Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.idl import IdlStruct, make_idl_struct
from cyclonedds.idl import types as idl
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration
from rosbags.interfaces import Nodetype

from real_robot.transports.action_types import ActionType, ServiceType
from real_robot.transports.actions import Answer, ServiceActionClient, remember
from real_robot.transports.base import Endpoint, GraphConnection, Handler, Publisher, QosConfig, TransportError
from real_robot.transports.messages import Message, MessageError
from real_robot.transports.ros.typestore import decode_cdr, encode_cdr, ros2_name, store_of

_log = logging.getLogger(__name__)
_POLL = 0.2  # seconds between looks whether to close
_MAX_ENDPOINTS = 10_000  # that a survey looks at
_HEADER = b"\x00\x01\x00\x00"  # of little-endian CDR
_CYCLONE = b"\x01\x10"  # what the ids of that vendor's participants begin with
_VENDORS = {b"\x01\x0f": "Fast DDS (rmw_fastrtps)", b"\x01\x01": "Connext (rmw_connextdds)"}
_CALL = struct.Struct("<Qq")  # a service's client, and its request's number


class Ros2Transport(GraphConnection):
    """A DDS participant.

    Raises:
        TransportError: the domain cannot be joined.
    """

    def __init__(self, domain: int, distro: str) -> None:
        super().__init__(f"dds {domain}")
        self._distro = distro
        try:
            self._participant = DomainParticipant(domain)
        except DDSException as error:
            raise TransportError(f"DDS domain {domain} cannot be joined: {error}") from error
        self._publications = BuiltinDataReader(self._participant, BuiltinTopicDcpsPublication)
        self._subscriptions = BuiltinDataReader(self._participant, BuiltinTopicDcpsSubscription)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._writers: dict[str, DataWriter] = {}

    @property
    def fault(self) -> str | None:
        """DDS has no master that could be lost."""
        return None

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        reader = DataReader(self._participant, self._topic(topic, message_type), dds_qos(qos))

        self._read(reader, topic, self._receiver(topic, lambda d: decode_cdr(d, message_type, self._distro), handler))

    def _read(self, reader: DataReader, name: str, deliver: Callable[[bytes], None]) -> None:
        """Call `deliver` with each sample's bytes, on a thread of its own."""

        def read() -> None:
            while not self._closing.is_set():
                for sample in reader.take_iter(timeout=duration(seconds=_POLL)):
                    if self._closing.is_set():
                        return
                    data = getattr(sample, "data", None)
                    if data is not None:  # None: a writer went away.
                        deliver(data)

        thread = threading.Thread(target=read, daemon=True, name=f"dds {name}")
        self._threads.append(thread)
        thread.start()

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        dds_topic = self._topic(topic, message_type)
        writer = self._writers[topic] = DataWriter(self._participant, dds_topic, dds_qos(qos))

        def publish(message: Message) -> None:
            sample = _holding(dds_topic.data_type, encode_cdr(message, self._distro))
            try:
                writer.write(sample)
            except DDSException as error:
                if not self._closing.is_set():
                    _log.warning("%s: not published: %s", topic, error)

        return publish

    def has_listener(self, topic: str) -> bool:
        return len(self._writers[topic].get_matched_subscriptions()) > 0

    def _topic(self, topic: str, message_type: type[Message]) -> Topic:
        return Topic(self._participant, f"rt/{topic.lstrip('/')}", dds_type(ros2_name(message_type), self._distro))

    def other_publishers(self, topic: str) -> list[str] | None:
        """The participants that discovery knows, by their keys. One that was killed is there for its lease of 10 s."""
        name, own = f"rt/{topic.lstrip('/')}", self._participant.guid
        found = [
            sample.participant_key
            for sample in self._publications.read(10_000)
            if sample.topic_name == name and sample.sample_info.instance_state == InstanceState.Alive
        ]
        return [f"participant {key}" for key in dict.fromkeys(found) if key != own]

    def service(self, name: str, service: ServiceType) -> Ros2Service:
        """A client of that service, of a server on rmw_cyclonedds.

        Raises:
            TransportError: discovery knows its server, and that is on another vendor's DDS.
        """
        bare = name.lstrip("/")
        for end in self._subscriptions.read(_MAX_ENDPOINTS):
            if end.topic_name == f"rq/{bare}Request" and (reason := _unspoken(end.participant_key)):
                raise TransportError(f"{name}: {reason}")
        client = f"clientid={'.'.join(f'{byte:x}' for byte in uuid.uuid4().bytes)};"
        qos = dds_qos(QosConfig(depth=10), client)  # A server waits with its answer until it has found our reader.
        request, reply = (
            Topic(self._participant, topic, dds_type(ros2_name(kind), self._distro, True))
            for topic, kind in ((f"rq/{bare}Request", service.request), (f"rr/{bare}Reply", service.response))
        )
        reader = DataReader(self._participant, reply, qos)
        made = Ros2Service(name, service, self._distro, DataWriter(self._participant, request, qos), reader)
        self._read(reader, name, made.receive)
        return made

    def action(self, name: str, action: ActionType) -> ServiceActionClient:
        """A client of that action. Raises as `service`."""
        return ServiceActionClient(self, name, action)

    def survey(self) -> list[Endpoint]:
        """See `Surveyor`. Nodes' names are not on the wire: an end is known by its participant's first digits."""
        ends = []
        for kind, publishes in ((BuiltinTopicDcpsPublication, True), (BuiltinTopicDcpsSubscription, False)):
            for end in BuiltinDataReader(self._participant, kind).read(_MAX_ENDPOINTS):
                if getattr(end, "participant_key", None) in (None, self._participant.guid):
                    continue  # a node that has left, or this one
                if end.topic_name.startswith(("rt/", "rq/")):
                    ends.append(_endpoint(end, publishes))
        return ends

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5 * _POLL)
        if not any(thread.is_alive() for thread in self._threads):
            self._participant.__del__()  # with all its writers: the others see at once that it has left


def _endpoint(end: Any, publishes: bool) -> Endpoint:
    """A DDS endpoint as ROS 2 would show it: rt/joint_states, sensor_msgs::msg::dds_::JointState_. Services: rq/."""
    reliable = end.qos[Policy.Reliability]
    return Endpoint(
        topic=end.topic_name.removeprefix("rt"),
        type=end.type_name.replace("::msg::dds_::", "/").removesuffix("_"),
        node=f"participant {str(end.participant_key)[:8]}",
        publishes=publishes,
        reliability="best_effort" if reliable == Policy.Reliability.BestEffort else "reliable",
        unspoken=_unspoken(end.participant_key) if end.topic_name.startswith("rq/") else "",
    )


def _unspoken(participant: uuid.UUID | None) -> str:
    """Why a participant's services cannot be called over this transport; empty where they can, or it is gone."""
    vendor = _CYCLONE if participant is None else participant.bytes[:2]
    if vendor == _CYCLONE:
        return ""
    return (
        f"its server is on {_VENDORS.get(vendor, f'DDS of vendor {vendor.hex()}')}, whose services and actions `kind: "
        "ros2` cannot call; start the robot's nodes with RMW_IMPLEMENTATION=rmw_cyclonedds_cpp, or set "
        "transport.kind: rclpy on a machine with ROS 2"
    )


class Ros2Service:
    """A client of one service: before the fields, its own number and the request's, by which it knows the answer."""

    def __init__(self, name: str, service: ServiceType, distro: str, writer: DataWriter, reader: DataReader) -> None:
        self._name, self._service, self._distro, self._writer, self._reader = name, service, distro, writer, reader
        self._client = secrets.randbits(64)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[Answer], None]] = {}

    @property
    def ready(self) -> bool:
        return bool(self._writer.get_matched_subscriptions()) and bool(self._reader.get_matched_publications())

    def call(self, request: Message, answer: Callable[[Answer], None]) -> None:
        servers = map(self._writer.get_matched_subscription_data, self._writer.get_matched_subscriptions())
        if reason := next(filter(None, (_unspoken(end.participant_key) for end in servers if end)), ""):
            answer(f"service {self._name}: {reason}")
            return
        number = next(self._numbers)
        remember(self._waiting, number, answer)
        data = _HEADER + _CALL.pack(self._client, number) + encode_cdr(request, self._distro)[len(_HEADER) :]
        sample = _holding(self._writer.topic.data_type, data)
        try:
            self._writer.write(sample)
        except DDSException as error:
            self._waiting.pop(number, None)
            answer(f"service {self._name}: {error}")

    def receive(self, data: bytes) -> None:
        """Take what was answered, to us or to another client."""
        start = len(_HEADER)
        if len(data) < start + _CALL.size or data[1] != _HEADER[1]:
            _log.warning("service %s: an answer of %d bytes is not readable", self._name, len(data))
            return
        client, number = _CALL.unpack_from(data, start)
        answer = self._waiting.pop(number, None) if client == self._client else None
        if answer is None:
            return
        try:
            answer(decode_cdr(_HEADER + data[start + _CALL.size :], self._service.response, self._distro))
        except MessageError as error:
            answer(f"service {self._name}: {error}")


def dds_qos(qos: QosConfig, user_data: str = "") -> Qos:
    """The DDS policies that ROS 2 sets for a topic, with XCDR version 1 as its encoding."""
    reliable, local = qos.reliability == "reliable", qos.durability == "transient_local"
    told = [Policy.Userdata(user_data.encode())] if user_data else []
    return Qos(
        *told,
        Policy.Reliability.Reliable(duration(milliseconds=100)) if reliable else Policy.Reliability.BestEffort,
        Policy.Durability.TransientLocal if local else Policy.Durability.Volatile,
        Policy.History.KeepLast(qos.depth),
        Policy.DataRepresentation(use_cdrv0_representation=True),
    )


@functools.cache
def dds_type(name: str, distro: str, is_call: bool = False) -> type[IdlStruct]:
    """The DDS type of a ROS 2 message, "sensor_msgs::msg::dds_::JointState_", whose samples hold encoded bytes.

    With `is_call` it is a service's request or response as rmw_cyclonedds sends it: two numbers come first.

    Only the description of the type is cyclonedds': its own encoder, in pure Python, needs 30 ms for a
    raw image where rosbags needs 0.5.
    """
    package, kind, short = name.split("/")
    _, definitions = store_of(distro).fielddefs[name]
    header = {"client": idl.uint64, "number": idl.int64} if is_call else {}
    fields = header | {field: _idl_of(node, distro) for field, node in definitions}
    made = make_idl_struct(short + "_", f"{package}.{kind}.dds_.{short}_", fields, dataclassify=False)

    def serialize(self: Any, *_: Any, **__: Any) -> bytes:
        return self.data

    def deserialize(data: bytes, *_: Any, **__: Any) -> Any:
        return _holding(made, bytes(data))

    made.serialize = serialize
    made.deserialize = staticmethod(deserialize)
    return made


def _holding(kind: type[IdlStruct], data: bytes) -> IdlStruct:
    """A sample of a `dds_type`."""
    sample = object.__new__(kind)
    sample.data = data  # pyright: ignore[reportAttributeAccessIssue]
    return sample


def _idl_of(node: Any, distro: str) -> Any:
    kind, detail = node
    if kind == Nodetype.NAME:
        return dds_type(detail, distro)
    if kind == Nodetype.BASE:
        return {"string": str, "bool": bool}.get(detail[0]) or getattr(idl, detail[0])
    inner, size = detail
    element = _idl_of(inner, distro)
    return idl.array[element, size] if kind == Nodetype.ARRAY else idl.sequence[element]
