"""Codec between messages and numbers or images, by the contract: joints, poses, conversions, frames, cameras."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image as Pillow

from real_robot.contract.channels import ActionSink, ConversionConfig, ImageSource, SourceConfig, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.transports.action_types import (
    FollowJointTrajectoryGoal,
    GoalMessage,
    GripperCommandGoal,
    ParallelGripperCommandGoal,
    SetBoolRequest,
)
from real_robot.transports.messages import (
    Bool,
    CompressedImage,
    Float64MultiArray,
    Image,
    JointGroupCommand,
    JointJog,
    JointSingleCommand,
    JointState,
    JointTrajectory,
    Message,
    MessageError,
    PoseStamped,
    TwistStamped,
    WrenchStamped,
)

MAX_SIDE = 8192
_CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
INTERBOTIX_GROUP = "arm"  # the name of the joints of an arm in Interbotix's motor configurations
_EMPTY = np.zeros(0)


def decode_image(
    message: Image | CompressedImage, size: tuple[int, int] | None = None, published: tuple[int, int] | None = None
) -> np.ndarray:
    """The picture, uint8 (height, width, 3), RGB.

    Args:
        size: (height, width) to resize to; None keeps the camera's.
        published: (height, width) that the camera's picture must have before; None: any.

    Raises:
        MessageError: unknown encoding, sizes that do not fit the data, too large, damaged or cut-off file, another size
            than `published`.
    """
    picture = _decode_raw(message) if isinstance(message, Image) else _decode_file(message.data)
    if published is not None and picture.shape[:2] != published:
        height, width = picture.shape[:2]
        raise MessageError(f"image of {height} x {width}, the contract says {published[0]} x {published[1]}")
    if size is None or picture.shape[:2] == size:
        return picture
    import cv2

    shrinks = picture.shape[0] >= size[0] and picture.shape[1] >= size[1]
    return cv2.resize(picture, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def encode_image(picture: np.ndarray, kind: str, quality: int = 95) -> bytes:
    """A picture, uint8 (height, width, 3) RGB, as a "jpeg" (of that quality) or "png" file."""
    buffer = io.BytesIO()
    Pillow.fromarray(picture).save(buffer, kind, **({"quality": quality} if kind == "jpeg" else {"compress_level": 1}))
    return buffer.getvalue()


def _decode_raw(message: Image) -> np.ndarray:
    channels = _CHANNELS.get(message.encoding)
    if channels is None:
        raise MessageError(f"image encoding {message.encoding!r} is not among {', '.join(_CHANNELS)}")
    height, width, step = message.height, message.width, message.step
    _check_size(height, width)
    if step < width * channels or len(message.data) != height * step:
        raise MessageError(
            f"image of {height} x {width} {message.encoding} with step {step} has {len(message.data)} bytes"
        )
    rows = np.frombuffer(message.data, np.uint8).reshape(height, step)[:, : width * channels]
    picture = rows.reshape(height, width, channels)
    if channels == 1:
        return np.repeat(picture, 3, axis=2)
    order = [2, 1, 0] if message.encoding.startswith("bgr") else [0, 1, 2]
    return np.ascontiguousarray(picture[..., order])


def _decode_file(data: bytes) -> np.ndarray:
    # libjpeg fills the missing part of a cut-off file with gray and only warns.
    if data.startswith(_JPEG_START) and not data.rstrip(b"\0").endswith(_JPEG_END):
        raise MessageError("JPEG cut off: it has no end marker")
    try:
        # No filter of warnings here: they are the whole process's, and cameras decode in several threads at once.
        with Pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")) as file:
            _check_size(file.height, file.width)  # As the header says, before anything is decoded.
            if file.mode not in ("RGB", "RGBA", "L"):
                raise MessageError(f"compressed image of mode {file.mode}; RGB, RGBA and L are read")
            return np.array(file.convert("RGB"))
    except MessageError:
        raise
    # Pillow's decoders raise these, and SyntaxError, for damaged files.
    except (
        OSError,
        ValueError,
        SyntaxError,
        IndexError,
        TypeError,
        EOFError,
        Pillow.DecompressionBombError,
    ) as e:
        raise MessageError(f"compressed image not readable: {e}") from None


def _check_size(height: int, width: int) -> None:
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise MessageError(f"image of {height} x {width}; each side is 1 to {MAX_SIDE}")


def check_frame(source: SourceConfig, message: Message) -> None:
    """
    Raises:
        MessageError: the message is in another frame than the contract says.
    """
    if source.frame and message.frame_id.lstrip("/") != source.frame.lstrip("/"):
        raise MessageError(f"frame {message.frame_id!r}, expected {source.frame!r}")


def read_image(source: ImageSource, message: Message) -> np.ndarray:
    """The camera's picture, uint8 (height, width, 3) RGB, of the contract's size.

    Raises:
        MessageError: not readable, or of another size than the contract says that the camera publishes.
    """
    assert isinstance(message, Image | CompressedImage)
    return decode_image(message, source.size, source.published)


def read_state(source: StateSource, message: Message) -> np.ndarray:
    """The numbers that the contract takes from a message, float32 (source.num_values,).

    Raises:
        MessageError: a joint missing, another number of values, NaN or infinity.
    """
    if isinstance(message, JointState):
        values = _by_name(source.joints, message.name, message.position)
    elif isinstance(message, PoseStamped):
        values = _read_pose(source, message)
    elif isinstance(message, WrenchStamped):
        values = np.concatenate([message.force, message.torque])
    elif isinstance(message, Float64MultiArray):
        values = message.data
    else:
        assert isinstance(message, Bool)
        values = np.array([float(message.data)])
    if len(values) != source.num_values:
        raise MessageError(f"{len(values)} numbers, the contract says {source.num_values}")
    values = _convert(values, source.convert)
    if not (fine := np.isfinite(values)).all():
        raise MessageError(f"NaN or infinity in {source.names[int(np.argmin(fine))]}")
    return values.astype(np.float32)


def _read_pose(source: StateSource, message: PoseStamped) -> np.ndarray:
    quaternion = _unit(message.orientation)
    parts = {
        "position": lambda: message.position,
        "quaternion": lambda: quaternion,
        "axis_angle": lambda: to_axis_angle(quaternion, np.array(source.axis_angle_near)),
    }
    return np.concatenate([parts[p]() for p in source.parts])


def axis_angles_near(source: StateSource) -> np.ndarray:
    """float32 (source.num_values,): what a pose's axis-angle is near, in the state's units; 0 for all other numbers."""
    values = np.zeros(source.num_values)
    if source.type == "geometry_msgs/PoseStamped":
        near = {"position": (0, 0, 0), "quaternion": (0, 0, 0, 0), "axis_angle": source.axis_angle_near}
        values = _convert(np.concatenate([near[part] for part in source.parts]), source.convert)
    return values.astype(np.float32)


def begins_near(contract: RobotContract, sink: ActionSink) -> np.ndarray:
    """float32 (len(sink.indices),): whose axis-angle a first commanded pose is near, that of what measures it."""
    near = np.concatenate([np.zeros(0, np.float32), *map(axis_angles_near, contract.observation.state)])
    limits = [contract.safety.dimensions[index] for index in sink.indices]
    return np.array([one.start or 0.0 if one.state is None else near[one.state] for one in limits], np.float32)


def _unit(quaternion: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(quaternion))
    if not 0.9 < length < 1.1:
        raise MessageError(f"orientation {quaternion.tolist()} is no unit quaternion")
    return quaternion / length


def to_axis_angle(quaternion: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Axis times angle (3,), radians, of a unit quaternion x, y, z, w: of its two within one turn, the nearer one."""
    sine, cosine = float(np.linalg.norm(quaternion[:3])), float(quaternion[3])
    if sine < 1e-12:
        return np.zeros(3)
    axis, angle = quaternion[:3] / sine, 2 * math.atan2(sine, cosine)  # angle in 0 .. 2 pi
    first, second = axis * angle, axis * (angle - 2 * math.pi)
    return min((first, second), key=lambda v: (float(np.linalg.norm(v - near)), float(np.linalg.norm(v))))


def to_quaternion(axis_angle: np.ndarray) -> np.ndarray:
    """Unit quaternion x, y, z, w (4,) of axis times angle, radians."""
    angle = float(np.linalg.norm(axis_angle))
    axis = np.asarray(axis_angle, np.float64) / angle if angle > 0 else np.zeros(3)
    return np.array([*(axis * math.sin(angle / 2)), math.cos(angle / 2)])


def write_action(sink: ActionSink, action: np.ndarray, stamp: int) -> Message:
    """The message that carries this sink's part of an action (A,), stamped `stamp` ns since the epoch."""
    values = _convert(np.asarray(action, np.float64)[list(sink.indices)], sink.convert)
    header = {"stamp": stamp, "frame_id": sink.frame}
    if sink.type == "geometry_msgs/TwistStamped":
        return TwistStamped(**header, linear=values[:3], angular=values[3:])
    if sink.type == "geometry_msgs/PoseStamped":
        return PoseStamped(**header, position=values[:3], orientation=to_quaternion(values[3:]))
    if sink.type == "trajectory_msgs/JointTrajectory":
        return _trajectory(sink, values, stamp)
    if sink.type == "control_msgs/JointJog":
        jog = {"velocities": values, "displacements": _EMPTY, "duration": sink.time_from_start}
        return JointJog(**header, joint_names=sink.joints, **jog)
    if sink.type == "sensor_msgs/JointState":
        return JointState(**header, name=sink.joints, position=values, velocity=_EMPTY, effort=_EMPTY)
    if sink.type == "std_msgs/Float64MultiArray":
        return Float64MultiArray(data=values)
    if sink.type == "interbotix_xs_msgs/JointGroupCommand":
        return JointGroupCommand(name=INTERBOTIX_GROUP, cmd=values)
    if sink.type == "interbotix_xs_msgs/JointSingleCommand":
        return JointSingleCommand(name=sink.joints[0], cmd=float(values[0]))
    return Bool(data=bool(values[0] > sink.threshold))


def write_goal(sink: ActionSink, action: np.ndarray) -> GoalMessage:
    """The goal that carries this sink's part of an action (A,). A trajectory begins when the server has it."""
    values = _convert(np.asarray(action, np.float64)[list(sink.indices)], sink.convert)
    if sink.type == "control_msgs/GripperCommand":
        return GripperCommandGoal(position=float(values[0]), max_effort=sink.goal.max_effort)
    if sink.type == "control_msgs/ParallelGripperCommand":
        effort = np.array([sink.goal.max_effort]) if sink.goal.max_effort else _EMPTY
        return ParallelGripperCommandGoal(
            command=JointState(name=sink.joints, position=values, velocity=_EMPTY, effort=effort)
        )
    if sink.type == "control_msgs/FollowJointTrajectory":
        return FollowJointTrajectoryGoal(trajectory=_trajectory(sink, values, stamp=0))
    return SetBoolRequest(data=bool(values[0] > sink.threshold))


def _trajectory(sink: ActionSink, values: np.ndarray, stamp: int) -> JointTrajectory:
    times = (round(sink.time_from_start * 1e9),)
    return JointTrajectory(
        stamp=stamp, frame_id=sink.frame, joint_names=sink.joints, positions=values[None], times=times
    )


def read_action(sink: ActionSink, message: Message, near: np.ndarray | None = None) -> np.ndarray:
    """The numbers of an action that a command carries, float32 (len(sink.indices),): `write_action` backwards.

    Args:
        near: numbers (len(sink.indices),) before it, or where it begins; of the two axis-angles of a pose the nearer
            one is taken.

    Raises:
        MessageError: other joints than the contract's, another number of values, NaN or infinity.
    """
    if isinstance(message, TwistStamped):
        values = np.concatenate([message.linear, message.angular])
    elif isinstance(message, PoseStamped):
        before = np.zeros(3) if near is None else _convert(near, sink.convert)[3:]
        values = np.concatenate([message.position, to_axis_angle(_unit(message.orientation), before)])
    elif isinstance(message, JointTrajectory):
        if not len(message.positions):
            raise MessageError("a trajectory without points")
        values = _by_name(sink.joints, message.joint_names, message.positions[0])
    elif isinstance(message, JointState):
        values = _by_name(sink.joints, message.name, message.position)
    elif isinstance(message, JointJog):
        values = _by_name(sink.joints, message.joint_names, message.velocities)
    elif isinstance(message, Float64MultiArray):
        values = message.data
    elif isinstance(message, JointGroupCommand):
        values = message.cmd
    elif isinstance(message, JointSingleCommand):
        values = np.array([message.cmd])
    else:
        assert isinstance(message, Bool)
        values = _read_switch(sink, message.data)
    if len(values) != len(sink.indices):
        raise MessageError(f"{len(values)} numbers, the contract says {len(sink.indices)}")
    if not isinstance(message, Bool):
        values = _unconvert(values, sink.convert)
    if not np.isfinite(values).all():
        raise MessageError("NaN or infinity")
    return values.astype(np.float32)


def _read_switch(sink: ActionSink, is_on: bool) -> np.ndarray:
    """A number (1,) that `write_action` makes this switch of: 1 or -1 where they do, else one beside the threshold."""
    plain = np.array([1.0 if is_on else -1.0])
    if bool(_convert(plain, sink.convert)[0] > sink.threshold) == is_on:
        return plain
    return _unconvert(sink.threshold + plain, sink.convert)


def _by_name(wanted: tuple[str, ...], names: tuple[str, ...], values: np.ndarray) -> np.ndarray:
    places = {name: i for i, name in enumerate(names)}
    missing = [name for name in wanted if name not in places]
    if missing or len(values) != len(names):
        raise MessageError(f"no value of joint {', '.join(missing or wanted)}")
    return values[[places[name] for name in wanted]]


def _convert(values: np.ndarray, convert: ConversionConfig) -> np.ndarray:
    return values * np.asarray(convert.scale) + np.asarray(convert.offset)


def _unconvert(values: np.ndarray, convert: ConversionConfig) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (values - np.asarray(convert.offset)) / np.asarray(convert.scale)
