"""The ROS messages that the bridge speaks, free of any ROS: typed, bounded, and the same for every transport.

A transport turns its own messages into a *tree*: nested dicts with ROS's field names, times as
{"sec", "nanosec"}, byte arrays as bytes, number arrays as lists or numpy arrays. `Message.from_tree` checks
a tree and makes the typed message; `tree` does the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

MAX_ITEMS = 4096  # joints, trajectory points, array elements
MAX_NAME = 256  # characters
MAX_TEXT = 65536
MAX_IMAGE_BYTES = 64 * 2**20
Tree = dict[str, Any]


class MessageError(ValueError):
    """A message that is not what its type says, or larger than allowed."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages. `stamp`: header time in ns since the epoch, 0 where the type has no header."""

    TYPE: ClassVar[str]
    HAS_HEADER: ClassVar[bool] = True
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
            return cls(**header, **cls._read(tree))
        except MessageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MessageError(f"{cls.TYPE}: not readable: {type(error).__name__}: {error}") from None

    def tree(self) -> Tree:
        """The message as a tree of ROS fields."""
        header = {"header": {"stamp": to_time(self.stamp), "frame_id": self.frame_id}} if self.HAS_HEADER else {}
        return {**header, **self._write()}

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        raise NotImplementedError

    def _write(self) -> Tree:
        raise NotImplementedError


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


def read_names(values: Any) -> tuple[str, ...]:
    """
    Raises:
        MessageError: no list of at most `MAX_ITEMS` short texts.
    """
    return tuple(read_text(v, MAX_NAME) for v in _items(values))


def _bytes(data: Any) -> bytes:
    data = data.tobytes() if isinstance(data, np.ndarray) else bytes(data)
    if len(data) > MAX_IMAGE_BYTES:
        raise MessageError(f"{len(data)} bytes of image, at most {MAX_IMAGE_BYTES} are allowed")
    return data


def _axes(tree: Mapping[str, Any], names: str) -> np.ndarray:
    return np.array([float(tree[name]) for name in names])


def _as_axes(values: np.ndarray, names: str) -> Tree:
    return {name: float(v) for name, v in zip(names, values, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Image(Message):
    """sensor_msgs/Image: `data` holds `height` rows of `step` bytes in `encoding`."""

    TYPE: ClassVar[str] = "sensor_msgs/Image"
    height: int
    width: int
    encoding: str
    is_bigendian: int = 0
    step: int
    data: bytes

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        numbers = {name: int(tree[name]) for name in ("height", "width", "is_bigendian", "step")}
        return {**numbers, "encoding": read_text(tree["encoding"], MAX_NAME), "data": _bytes(tree["data"])}

    def _write(self) -> Tree:
        return {
            "height": self.height,
            "width": self.width,
            "encoding": self.encoding,
            "is_bigendian": self.is_bigendian,
            "step": self.step,
            "data": self.data,
        }


@dataclass(frozen=True, kw_only=True)
class CompressedImage(Message):
    """sensor_msgs/CompressedImage: `data` is a JPEG or PNG file; `format` says which, and is not relied on."""

    TYPE: ClassVar[str] = "sensor_msgs/CompressedImage"
    format: str
    data: bytes

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"format": read_text(tree["format"], MAX_NAME), "data": _bytes(tree["data"])}

    def _write(self) -> Tree:
        return {"format": self.format, "data": self.data}


@dataclass(frozen=True, kw_only=True)
class JointState(Message):
    """sensor_msgs/JointState: joint names, and a value each of position (rad or m), velocity, effort where sent."""

    TYPE: ClassVar[str] = "sensor_msgs/JointState"
    name: tuple[str, ...]
    position: np.ndarray
    velocity: np.ndarray
    effort: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        names = read_names(tree["name"])
        values = {part: read_numbers(tree[part]) for part in ("position", "velocity", "effort")}
        for part, array in values.items():
            if len(array) not in (0, len(names)):
                raise MessageError(f"{cls.TYPE}: {len(array)} values of {part} for {len(names)} names")
        return {"name": names, **values}

    def _write(self) -> Tree:
        values = {part: np.asarray(getattr(self, part), np.float64) for part in ("position", "velocity", "effort")}
        return {"name": list(self.name), **values}


@dataclass(frozen=True, kw_only=True)
class PoseStamped(Message):
    """geometry_msgs/PoseStamped: position (3,) in meters, orientation (4,) as quaternion x, y, z, w."""

    TYPE: ClassVar[str] = "geometry_msgs/PoseStamped"
    position: np.ndarray
    orientation: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        pose = tree["pose"]
        return {"position": _axes(pose["position"], "xyz"), "orientation": _axes(pose["orientation"], "xyzw")}

    def _write(self) -> Tree:
        orientation = _as_axes(self.orientation, "xyzw")
        return {"pose": {"position": _as_axes(self.position, "xyz"), "orientation": orientation}}


@dataclass(frozen=True, kw_only=True)
class TwistStamped(Message):
    """geometry_msgs/TwistStamped: linear (3,) in m/s, angular (3,) in rad/s, in the frame `frame_id`."""

    TYPE: ClassVar[str] = "geometry_msgs/TwistStamped"
    linear: np.ndarray
    angular: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        twist = tree["twist"]
        return {"linear": _axes(twist["linear"], "xyz"), "angular": _axes(twist["angular"], "xyz")}

    def _write(self) -> Tree:
        return {"twist": {"linear": _as_axes(self.linear, "xyz"), "angular": _as_axes(self.angular, "xyz")}}


@dataclass(frozen=True, kw_only=True)
class WrenchStamped(Message):
    """geometry_msgs/WrenchStamped: force (3,) in N, torque (3,) in Nm, in the frame `frame_id`."""

    TYPE: ClassVar[str] = "geometry_msgs/WrenchStamped"
    force: np.ndarray
    torque: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        wrench = tree["wrench"]
        return {"force": _axes(wrench["force"], "xyz"), "torque": _axes(wrench["torque"], "xyz")}

    def _write(self) -> Tree:
        return {"wrench": {"force": _as_axes(self.force, "xyz"), "torque": _as_axes(self.torque, "xyz")}}


@dataclass(frozen=True, kw_only=True)
class JointTrajectory(Message):
    """trajectory_msgs/JointTrajectory: (P, J) joint positions, reached `times` (P,) ns after the start."""

    TYPE: ClassVar[str] = "trajectory_msgs/JointTrajectory"
    joint_names: tuple[str, ...]
    positions: np.ndarray
    times: tuple[int, ...]

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        names, points = read_names(tree["joint_names"]), _items(tree["points"])
        rows = [read_numbers(p["positions"]) for p in points]
        if any(len(row) != len(names) for row in rows):
            raise MessageError(f"{cls.TYPE}: a point whose positions are not one for each of {len(names)} joints")
        positions = np.array(rows).reshape(len(rows), len(names))
        times = tuple(from_time(p["time_from_start"]) for p in points)
        return {"joint_names": names, "positions": positions, "times": times}

    def _write(self) -> Tree:
        none = np.zeros(0)
        points = [
            {
                "positions": np.asarray(row, np.float64),
                "velocities": none,
                "accelerations": none,
                "effort": none,
                "time_from_start": to_time(t),
            }
            for row, t in zip(self.positions, self.times, strict=True)
        ]
        return {"joint_names": list(self.joint_names), "points": points}


@dataclass(frozen=True, kw_only=True)
class JointJog(Message):
    """control_msgs/JointJog: a velocity (rad/s or m/s) for each joint, or a displacement, for `duration` seconds."""

    TYPE: ClassVar[str] = "control_msgs/JointJog"
    joint_names: tuple[str, ...]
    velocities: np.ndarray
    displacements: np.ndarray
    duration: float

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        names = read_names(tree["joint_names"])
        values = {part: read_numbers(tree[part]) for part in ("velocities", "displacements")}
        for part, array in values.items():
            if len(array) not in (0, len(names)):
                raise MessageError(f"{cls.TYPE}: {len(array)} {part} for {len(names)} joints")
        return {"joint_names": names, **values, "duration": float(tree["duration"])}

    def _write(self) -> Tree:
        values = {part: np.asarray(getattr(self, part), np.float64) for part in ("displacements", "velocities")}
        return {"joint_names": list(self.joint_names), **values, "duration": float(self.duration)}


@dataclass(frozen=True, kw_only=True)
class JointGroupCommand(Message):
    """interbotix_xs_msgs/JointGroupCommand: a number for each joint of a group, in the driver's order of them."""

    TYPE: ClassVar[str] = "interbotix_xs_msgs/JointGroupCommand"
    HAS_HEADER: ClassVar[bool] = False
    name: str
    cmd: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"name": read_text(tree["name"], MAX_NAME), "cmd": read_numbers(tree["cmd"])}

    def _write(self) -> Tree:
        return {"name": self.name, "cmd": np.asarray(self.cmd, np.float32)}


@dataclass(frozen=True, kw_only=True)
class JointSingleCommand(Message):
    """interbotix_xs_msgs/JointSingleCommand: a number for one joint."""

    TYPE: ClassVar[str] = "interbotix_xs_msgs/JointSingleCommand"
    HAS_HEADER: ClassVar[bool] = False
    name: str
    cmd: float

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"name": read_text(tree["name"], MAX_NAME), "cmd": float(tree["cmd"])}

    def _write(self) -> Tree:
        return {"name": self.name, "cmd": float(self.cmd)}


@dataclass(frozen=True, kw_only=True)
class Float64MultiArray(Message):
    """std_msgs/Float64MultiArray, without its layout: the numbers alone."""

    TYPE: ClassVar[str] = "std_msgs/Float64MultiArray"
    HAS_HEADER: ClassVar[bool] = False
    data: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"data": read_numbers(tree["data"])}

    def _write(self) -> Tree:
        return {"layout": {"dim": [], "data_offset": 0}, "data": np.asarray(self.data, np.float64)}


@dataclass(frozen=True, kw_only=True)
class Bool(Message):
    """std_msgs/Bool."""

    TYPE: ClassVar[str] = "std_msgs/Bool"
    HAS_HEADER: ClassVar[bool] = False
    data: bool

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"data": bool(tree["data"])}

    def _write(self) -> Tree:
        return {"data": self.data}


@dataclass(frozen=True, kw_only=True)
class String(Message):
    """std_msgs/String."""

    TYPE: ClassVar[str] = "std_msgs/String"
    HAS_HEADER: ClassVar[bool] = False
    data: str

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"data": read_text(tree["data"], MAX_TEXT)}

    def _write(self) -> Tree:
        return {"data": self.data}


MESSAGES: dict[str, type[Message]] = {
    kind.TYPE: kind
    for kind in (
        *(Image, CompressedImage, JointState, PoseStamped, TwistStamped, WrenchStamped),
        *(JointTrajectory, JointJog, JointGroupCommand, JointSingleCommand, Float64MultiArray, Bool, String),
    )
}
