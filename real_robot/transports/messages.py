"""The ROS messages that the bridge speaks, free of any ROS: typed, bounded, and the same for every transport.

A transport turns its own messages into a *tree*: nested dicts with ROS's field names, times as
{"sec", "nanosec"}, byte arrays as bytes, number arrays as lists or numpy arrays. `Message.from_tree` checks
a tree and makes the typed message; `tree` does the reverse. How a field is read and written is said by its annotation,
a `Wire`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np

MAX_ITEMS = 4096  # joints, trajectory points, array elements
MAX_NAME = 256  # characters
MAX_TEXT = 65536
MAX_IMAGE_BYTES = 64 * 2**20
Tree = dict[str, Any]


class MessageError(ValueError):
    """A message that is not what its type says, or larger than allowed."""


@dataclass(frozen=True)
class Wire:
    """How one field stands in a tree: `read` checks and converts it, `write` does the reverse."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages. `stamp`: header time in ns since the epoch, 0 where the type has no header.

    `UNDER`: name of the part of the tree that holds the fields; "": its root. `CONSTANT`: what else the tree holds.
    """

    TYPE: ClassVar[str]
    HAS_HEADER: ClassVar[bool] = True
    UNDER: ClassVar[str] = ""
    CONSTANT: ClassVar[Tree] = {}
    stamp: int = 0
    frame_id: str = ""

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """The typed message.

        Raises:
            MessageError: a field missing, of another kind, or larger than allowed.
        """
        try:
            header = _read_header(tree["header"]) if cls.HAS_HEADER else {}
            message = cls(**header, **cls._read(tree[cls.UNDER] if cls.UNDER else tree))
            message._check()
        except MessageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MessageError(f"{cls.TYPE}: not readable: {type(error).__name__}: {error}") from None
        return message

    def tree(self) -> Tree:
        """The message as a tree of ROS fields."""
        header = {"header": {"stamp": to_time(self.stamp), "frame_id": self.frame_id}} if self.HAS_HEADER else {}
        fields = {**self.CONSTANT, **self._write()}
        return {**header, **({self.UNDER: fields} if self.UNDER else fields)}

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {name: wire.read(tree[name]) for name, wire in _wires(cls).items()}

    def _write(self) -> Tree:
        return {name: wire.write(getattr(self, name)) for name, wire in _wires(type(self)).items()}

    def _check(self) -> None:
        """
        Raises:
            MessageError: fields that do not fit together.
        """

    def _check_lengths(self, names: tuple[str, ...], *parts: str) -> None:
        """Each of these fields has a number for each name, or none at all."""
        for part in parts:
            if (size := len(getattr(self, part))) not in (0, len(names)):
                raise MessageError(f"{self.TYPE}: {size} values of {part} for {len(names)} names")


@functools.cache
def _wires(kind: type[Message]) -> dict[str, Wire]:
    hints = get_type_hints(kind, include_extras=True)
    return {n: h.__metadata__[0] for n, h in hints.items() if isinstance(getattr(h, "__metadata__", [0])[0], Wire)}


def to_time(nanoseconds: int) -> Tree:
    """A ROS time (or duration) of that many nanoseconds."""
    return {"sec": nanoseconds // 10**9, "nanosec": nanoseconds % 10**9}


def from_time(tree: Mapping[str, Any]) -> int:
    """Nanoseconds of a ROS 1 or 2 time."""
    sec = tree["sec"] if "sec" in tree else tree["secs"]
    return int(sec) * 10**9 + int(tree["nanosec"] if "nanosec" in tree else tree["nsecs"])


def _read_header(header: Mapping[str, Any]) -> Tree:
    return {"stamp": from_time(header["stamp"]), "frame_id": read_text(header["frame_id"], MAX_NAME)}


def read_text(value: Any, limit: int = MAX_TEXT) -> str:
    """
    Raises:
        MessageError: no text, or longer than `limit` characters.
    """
    if not isinstance(value, str) or len(value) > limit:
        raise MessageError(f"expected text of at most {limit} characters, got {str(value)[:40]!r}")
    return value


def _items(values: Sequence[Any]) -> Sequence[Any]:
    if len(values) > MAX_ITEMS:
        raise MessageError(f"{len(values)} items, at most {MAX_ITEMS} are allowed")
    return values


def read_numbers(values: Any) -> np.ndarray:
    """
    Raises:
        MessageError: no list of at most `MAX_ITEMS` numbers.
    """
    array = np.asarray(_items(values), np.float64)
    if array.ndim != 1:
        raise MessageError(f"expected a list of numbers, got shape {array.shape}")
    return array


def _read_names(values: Any) -> tuple[str, ...]:
    return tuple(read_text(v, MAX_NAME) for v in _items(values))


def _read_bytes(data: Any) -> bytes:
    data = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    if len(data) > MAX_IMAGE_BYTES:
        raise MessageError(f"{len(data)} bytes of image, at most {MAX_IMAGE_BYTES} are allowed")
    return data


def _axes(names: str) -> Wire:
    return Wire(
        lambda tree: np.array([float(tree[name]) for name in names]),
        lambda values: {name: float(v) for name, v in zip(names, values, strict=True)},
    )


def _same(value: Any) -> Any:
    return value


Text = Annotated[str, Wire(read_text, _same)]
Name = Annotated[str, Wire(lambda value: read_text(value, MAX_NAME), _same)]
Names = Annotated[tuple[str, ...], Wire(_read_names, list)]
Int = Annotated[int, Wire(int, _same)]
Float = Annotated[float, Wire(float, float)]
Flag = Annotated[bool, Wire(bool, _same)]
Bytes = Annotated[bytes, Wire(_read_bytes, _same)]
Numbers = Annotated[np.ndarray, Wire(read_numbers, lambda values: np.asarray(values, np.float64))]
Numbers32 = Annotated[np.ndarray, Wire(read_numbers, lambda values: np.asarray(values, np.float32))]
Vector = Annotated[np.ndarray, _axes("xyz")]
Quaternion = Annotated[np.ndarray, _axes("xyzw")]
Nanoseconds = Annotated[int, Wire(from_time, to_time)]


@dataclass(frozen=True, kw_only=True)
class Plain(Message):
    """Base of messages without a header of their own."""

    HAS_HEADER: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Image(Message):
    """sensor_msgs/Image: `data` holds `height` rows of `step` bytes in `encoding`."""

    TYPE: ClassVar[str] = "sensor_msgs/Image"
    height: Int
    width: Int
    encoding: Name
    is_bigendian: Int = 0
    step: Int
    data: Bytes


@dataclass(frozen=True, kw_only=True)
class CompressedImage(Message):
    """sensor_msgs/CompressedImage: `data` is a JPEG or PNG file; `format` says which, and is not relied on."""

    TYPE: ClassVar[str] = "sensor_msgs/CompressedImage"
    format: Name
    data: Bytes


@dataclass(frozen=True, kw_only=True)
class JointState(Message):
    """sensor_msgs/JointState: joint names, and a value each of position (rad or m), velocity, effort where sent."""

    TYPE: ClassVar[str] = "sensor_msgs/JointState"
    name: Names
    position: Numbers
    velocity: Numbers
    effort: Numbers

    def _check(self) -> None:
        self._check_lengths(self.name, "position", "velocity", "effort")


@dataclass(frozen=True, kw_only=True)
class PoseStamped(Message):
    """geometry_msgs/PoseStamped: position (3,) in meters, orientation (4,) as quaternion x, y, z, w."""

    TYPE: ClassVar[str] = "geometry_msgs/PoseStamped"
    UNDER: ClassVar[str] = "pose"
    position: Vector
    orientation: Quaternion


@dataclass(frozen=True, kw_only=True)
class TwistStamped(Message):
    """geometry_msgs/TwistStamped: linear (3,) in m/s, angular (3,) in rad/s, in the frame `frame_id`."""

    TYPE: ClassVar[str] = "geometry_msgs/TwistStamped"
    UNDER: ClassVar[str] = "twist"
    linear: Vector
    angular: Vector


@dataclass(frozen=True, kw_only=True)
class WrenchStamped(Message):
    """geometry_msgs/WrenchStamped: force (3,) in N, torque (3,) in Nm, in the frame `frame_id`."""

    TYPE: ClassVar[str] = "geometry_msgs/WrenchStamped"
    UNDER: ClassVar[str] = "wrench"
    force: Vector
    torque: Vector


@dataclass(frozen=True, kw_only=True)
class JointTrajectory(Message):
    """trajectory_msgs/JointTrajectory: (P, J) joint positions, reached `times` (P,) ns after the start."""

    TYPE: ClassVar[str] = "trajectory_msgs/JointTrajectory"
    joint_names: tuple[str, ...]
    positions: np.ndarray
    times: tuple[int, ...]

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        names, points = _read_names(tree["joint_names"]), _items(tree["points"])
        rows = [read_numbers(p["positions"]) for p in points]
        if any(len(row) != len(names) for row in rows):
            raise MessageError(f"{cls.TYPE}: a point whose positions are not one for each of {len(names)} joints")
        positions = np.array(rows).reshape(len(rows), len(names))
        times = tuple(from_time(p["time_from_start"]) for p in points)
        return {"joint_names": names, "positions": positions, "times": times}

    def _write(self) -> Tree:
        none = dict.fromkeys(("velocities", "accelerations", "effort"), np.zeros(0))
        points = [
            {"positions": np.asarray(row, np.float64), **none, "time_from_start": to_time(t)}
            for row, t in zip(self.positions, self.times, strict=True)
        ]
        return {"joint_names": list(self.joint_names), "points": points}


@dataclass(frozen=True, kw_only=True)
class JointJog(Message):
    """control_msgs/JointJog: a velocity (rad/s or m/s) for each joint, or a displacement, for `duration` seconds."""

    TYPE: ClassVar[str] = "control_msgs/JointJog"
    joint_names: Names
    displacements: Numbers
    velocities: Numbers
    duration: Float

    def _check(self) -> None:
        self._check_lengths(self.joint_names, "velocities", "displacements")


@dataclass(frozen=True, kw_only=True)
class JointGroupCommand(Plain):
    """interbotix_xs_msgs/JointGroupCommand: a number for each joint of a group, in the driver's order of them."""

    TYPE: ClassVar[str] = "interbotix_xs_msgs/JointGroupCommand"
    name: Name
    cmd: Numbers32


@dataclass(frozen=True, kw_only=True)
class JointSingleCommand(Plain):
    """interbotix_xs_msgs/JointSingleCommand: a number for one joint."""

    TYPE: ClassVar[str] = "interbotix_xs_msgs/JointSingleCommand"
    name: Name
    cmd: Float


@dataclass(frozen=True, kw_only=True)
class Float64MultiArray(Plain):
    """std_msgs/Float64MultiArray, without its layout: the numbers alone."""

    TYPE: ClassVar[str] = "std_msgs/Float64MultiArray"
    CONSTANT: ClassVar[Tree] = {"layout": {"dim": [], "data_offset": 0}}
    data: Numbers


@dataclass(frozen=True, kw_only=True)
class Bool(Plain):
    """std_msgs/Bool."""

    TYPE: ClassVar[str] = "std_msgs/Bool"
    data: Flag


@dataclass(frozen=True, kw_only=True)
class String(Plain):
    """std_msgs/String."""

    TYPE: ClassVar[str] = "std_msgs/String"
    data: Text


MESSAGES: dict[str, type[Message]] = {
    kind.TYPE: kind
    for kind in (
        *(Image, CompressedImage, JointState, PoseStamped, TwistStamped, WrenchStamped),
        *(JointTrajectory, JointJog, JointGroupCommand, JointSingleCommand, Float64MultiArray, Bool, String),
    )
}
