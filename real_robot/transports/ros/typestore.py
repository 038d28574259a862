"""Message trees to rosbags' message objects and back: ROS 2's CDR encoding without ROS 2, and recorded bags."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from real_robot.transports.messages import Message, MessageError, Tree
from real_robot.transports.ros.definitions import ros1_texts, ros2_texts


def ros2_name(message_type: type[Message]) -> str:
    """ "sensor_msgs/JointState" in ROS 2: "sensor_msgs/msg/JointState"; parts of services and actions as is."""
    name = message_type.TYPE
    return name if name.count("/") == 2 else name.replace("/", "/msg/")


@functools.cache
def store_of(distro: str) -> Any:
    """rosbags' message definitions, and ours, of a ROS 2 distribution ("humble", "jazzy", ...) or "noetic" (ROS 1)."""
    is_ros1 = distro == "noetic"
    store = get_typestore(Stores[f"ROS1_{distro.upper()}" if is_ros1 else f"ROS2_{distro.upper()}"])
    for name, text in (ros1_texts() if is_ros1 else ros2_texts(distro)).items():
        full = name if name.count("/") == 2 else name.replace("/", "/msg/")
        if full not in store.fielddefs:
            (definition,) = get_types_from_msg(text, full).values()  # under a name of rosbags' making, for services
            store.register({full: definition})
    return store


def encode_cdr(message: Message, distro: str) -> bytes:
    """The message as ROS 2 sends it: CDR, little-endian, with its 4-byte header."""
    store, name = store_of(distro), ros2_name(type(message))
    return bytes(store.serialize_cdr(native_of(store, name, message.tree()), name))


def decode_cdr[M: Message](data: bytes, message_type: type[M], distro: str) -> M:
    """The reverse of `encode_cdr`.

    Raises:
        MessageError: bytes that are no such message.
    """
    try:
        native = store_of(distro).deserialize_cdr(data, ros2_name(message_type))
    except Exception as error:  # rosbags' generated decoders raise whatever the damage leads to
        raise MessageError(f"{message_type.TYPE}: not readable: {error}") from None
    return message_type.from_tree(tree_of(native))


def tree_of(native: Any) -> Any:
    """A rosbags message as a tree (see `real_robot.transports.messages`)."""
    if is_dataclass(native):
        return {f.name: tree_of(getattr(native, f.name)) for f in fields(native) if f.name != "__msgtype__"}
    if isinstance(native, list) and native and is_dataclass(native[0]):
        return [tree_of(item) for item in native]
    return native


def native_of(store: Any, name: str, tree: Mapping[str, Any]) -> Any:
    """A tree as rosbags' own message of that type name."""
    _, definitions = store.fielddefs[name]
    # What a tree leaves out is zero or empty: tolerances of trajectories, ROS 1's sequence number in headers.
    values = {f: _value(store, node, tree[f]) if f in tree else _default(store, node) for f, node in definitions}
    return store.types[name](**values)


def _default(store: Any, node: Any) -> Any:
    kind, detail = node
    if kind == Nodetype.NAME:
        return native_of(store, detail, {})
    if kind == Nodetype.BASE:
        return "" if detail[0] == "string" else 0
    return _value(store, node, [0] * detail[1] if kind == Nodetype.ARRAY else [])


def _value(store: Any, node: Any, value: Any) -> Any:
    kind, detail = node
    if kind == Nodetype.NAME:
        return native_of(store, detail, value)
    if kind == Nodetype.BASE:
        return value
    (inner_kind, inner), _ = detail
    if inner_kind == Nodetype.NAME:
        return [native_of(store, inner, item) for item in value]
    if inner[0] == "string":
        return list(value)
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return np.asarray(value, inner[0])


def plain_tree(tree: Tree) -> Tree:
    """The tree with numpy arrays as lists, for comparisons and JSON."""
    return {
        key: plain_tree(value)
        if isinstance(value, dict)
        else [plain_tree(v) if isinstance(v, dict) else v for v in value]
        if isinstance(value, list)
        else value.tolist()
        if isinstance(value, np.ndarray)
        else value
        for key, value in tree.items()
    }
