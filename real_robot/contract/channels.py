"""The topics of a robot's contract: which message holds which part of an observation or of an action."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from real_robot.transports.action_types import ACTIONS, SERVICES
from real_robot.transports.base import QosConfig
from real_robot.transports.lerobot_devices import make_camera
from real_robot.transports.messages import MESSAGES, Message
from vla_rl.config import Config, ConfigError

TOPIC = r"^~?/?[A-Za-z][A-Za-z0-9_/]*$"
POSE_PARTS = {
    "position": ("x", "y", "z"),
    "quaternion": ("qx", "qy", "qz", "qw"),
    "axis_angle": ("rx", "ry", "rz"),
}
JOINT_COMMANDS = (
    *("trajectory_msgs/JointTrajectory", "sensor_msgs/JointState"),
    *("control_msgs/JointJog", "control_msgs/FollowJointTrajectory", "control_msgs/ParallelGripperCommand"),
    *("interbotix_xs_msgs/JointGroupCommand", "interbotix_xs_msgs/JointSingleCommand"),
)


class CameraConfig(Config):
    """A camera of this machine, in place of a topic."""

    kind: Literal["opencv", "realsense"] = Field(description="LeRobot's camera class: OpenCV's, or Intel RealSense.")
    index: int | str = Field(
        default=0, description="opencv: the camera's number, its path (/dev/video0), or the URL of a network camera."
    )
    serial: str = Field(default="", description="realsense: serial number or name (`lerobot-find-cameras realsense`).")
    width: int | None = Field(default=None, gt=0, description="Pixels that the camera is set to; null: its own.")
    height: int | None = Field(default=None, gt=0, description="Pixels that the camera is set to; null: its own.")
    fps: int | None = Field(default=None, gt=0, description="Frames a second that it is set to; null: its own.")
    settings: dict[str, Any] = Field(default={}, description="Other fields of LeRobot's camera config.")
    patience: float = Field(
        default=1.0,
        gt=0,
        description="Seconds without a frame before the robot is stopped until a person resets it; it holds earlier, "
        "when its observation is too old.",
    )

    @model_validator(mode="after")
    def _check(self) -> CameraConfig:
        if (self.kind == "realsense") != bool(self.serial):
            raise ConfigError(f"camera: `serial` belongs to kind realsense, and is required there; kind is {self.kind}")
        if len({v is None for v in (self.width, self.height)}) > 1:
            raise ConfigError("camera: width and height: both or none")
        return self

    @property
    def place(self) -> str:
        """Which camera it is, for messages."""
        return f"realsense {self.serial}" if self.kind == "realsense" else f"opencv {self.index}"

    def make(self) -> Any:
        """LeRobot's camera, not connected yet.

        Raises:
            DeviceError: its library is missing, or a setting is wrong.
        """
        size = {k: v for k in ("width", "height", "fps") if (v := getattr(self, k)) is not None}
        if self.kind == "realsense":
            return make_camera("intelrealsense", {**self.settings, **size, "serial_number_or_name": self.serial})
        if "://" not in str(self.index):
            return make_camera("opencv", {**self.settings, **size, "index_or_path": self.index})
        device = make_camera("opencv", {**self.settings, **size, "index_or_path": 0})
        device.index_or_path = str(self.index)  # LeRobot's config would make a path of it, with one slash
        return device


class GoalConfig(Config):
    """When a goal is sent, and what counts as failed."""

    change: float = Field(
        default=0.001,
        ge=0,
        description="A goal is sent when a number differs by more than this from the last goal's, after `convert`: "
        "meters or radians for most controllers.",
    )
    period: float = Field(default=0.1, ge=0, description="Seconds between two goals, at least.")
    max_effort: float = Field(
        default=0.0, ge=0, description="Grippers: newtons; what 0 means is the controller's to say."
    )
    aborted: Literal["fault", "stalled", "fine"] = Field(
        default="stalled",
        description="What a gripper's goal is that its server aborts: a fault; none where the result says that the "
        "fingers stalled, which is a grip; or none in any case, for drivers that cannot tell a grip from a failure.",
    )
    timeout: float = Field(
        default=1.0, gt=0, description="Seconds that the server has to accept a goal, or to end one that is canceled."
    )


class AlignConfig(Config):
    """Which message of a topic belongs to an observation."""

    strategy: Literal["hold", "asof", "drop"] = Field(
        default="asof",
        description="hold: the newest, however old. asof: the newest that is not after the observation's time and at "
        "most `tolerance` before it. drop: the same, and it must not have been used before.",
    )
    timeline: Literal["header", "receive"] = Field(
        default="header",
        description="Time of a message: its header's stamp (needs synchronized clocks) or its arrival.",
    )
    tolerance: float = Field(default=0.1, gt=0, description="Seconds; see strategy.")


class ChannelConfig(Config):
    """One topic."""

    topic: str = Field(description="Topic name, such as /joint_states.", pattern=TOPIC)
    type: str = Field(description="Message type, such as sensor_msgs/JointState.")
    qos: QosConfig = QosConfig()

    @property
    def message_type(self) -> type[Message]:
        return MESSAGES[self.type]


class SourceConfig(ChannelConfig):
    """A topic that is read."""

    align: AlignConfig = AlignConfig()
    frame: str = Field(default="", description="The header's frame_id must be this; empty takes any.")
    rate: float | None = Field(
        default=None, gt=0, description="Messages a second that its driver sends, which `vla-rl doctor` expects of it."
    )

    @model_validator(mode="after")
    def _check_timeline(self) -> SourceConfig:
        if self.type in MESSAGES and not self.message_type.HAS_HEADER:
            if self.align.timeline == "header":
                raise ConfigError(f"{self.topic}: {self.type} has no header; set align.timeline: receive")
            if self.frame:
                raise ConfigError(
                    f"{self.topic}: {self.type} has no header, so no frame to compare with {self.frame!r}"
                )
        return self


class ImageSource(SourceConfig):
    """A camera: a topic, or one on this machine."""

    topic: str = Field(default="", description="Topic name, such as /camera/color/image_raw.", pattern=TOPIC + "|^$")
    camera: CameraConfig | None = Field(default=None, description="A camera of this machine, in place of a topic.")

    type: Literal["sensor_msgs/Image", "sensor_msgs/CompressedImage"] = Field(
        default="sensor_msgs/CompressedImage", description="Message type."
    )
    size: tuple[int, int] | None = Field(default=None, description="(height, width) to resize to; null keeps.")
    published: tuple[int, int] | None = Field(
        default=None,
        description="(height, width) that the camera publishes; pictures of another size are refused. null: any.",
    )

    @model_validator(mode="after")
    def _check_camera(self) -> ImageSource:
        if bool(self.topic) == (self.camera is not None):
            raise ConfigError(f"observation.images: each has a `topic` or a `camera`, one of them; got {self.topic!r}")
        return self


class ConversionConfig(Config):
    """number * scale + offset, each one number for all or one for each; for actions the same, on the way out."""

    scale: float | tuple[float, ...] = Field(default=1.0, description="Factor: 57.2958 makes degrees of radians.")
    offset: float | tuple[float, ...] = Field(default=0.0, description="Added after scaling.")

    def of(self, place: int) -> tuple[float, float]:
        """Scale and offset of the number at that place."""
        scale, offset = (v[place] if isinstance(v, tuple) else v for v in (self.scale, self.offset))
        return scale, offset


class StateSource(SourceConfig):
    """A topic that gives some numbers of the state, in the order of the contract's list."""

    type: Literal[
        "sensor_msgs/JointState",
        "geometry_msgs/PoseStamped",
        "geometry_msgs/WrenchStamped",
        "std_msgs/Float64MultiArray",
        "std_msgs/Bool",
    ] = Field(description="Message type. Of a wrench: force x, y, z in N, then torque x, y, z in Nm.")
    joints: tuple[str, ...] = Field(default=(), description="JointState: these joints, by name, in this order.")
    parts: tuple[Literal["position", "quaternion", "axis_angle"], ...] = Field(
        default=("position", "quaternion"), description="PoseStamped: what to take, in order."
    )
    axis_angle_near: tuple[float, float, float] = Field(
        default=(0.0, 0.0, 0.0),
        description="Which of the two axis-angles of a rotation is taken: the one nearer to this; (3.1416, 0, 0) for a "
        "gripper that points down keeps the numbers from jumping.",
    )
    size: int = Field(default=1, ge=1, le=256, description="Float64MultiArray: how many numbers it must have.")
    convert: ConversionConfig = ConversionConfig()

    @model_validator(mode="after")
    def _check_joints(self) -> StateSource:
        if (self.type == "sensor_msgs/JointState") != bool(self.joints):
            raise ConfigError(f"{self.topic}: `joints` belongs to sensor_msgs/JointState, and is required there")
        if len(set(self.joints)) < len(self.joints):
            raise ConfigError(f"{self.topic}: joints: {list(self.joints)} names one twice")
        _check_lengths(self.topic, self.convert, self.num_values)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers of the state that this gives: of the joints, else by the topic, as in `pose.x`."""
        topic = self.topic.strip("/").replace("/", ".")
        match self.type:
            case "sensor_msgs/JointState":
                return self.joints
            case "geometry_msgs/PoseStamped":
                return tuple(f"{topic}.{name}" for part in self.parts for name in POSE_PARTS[part])
            case "geometry_msgs/WrenchStamped":
                return tuple(f"{topic}.{part}{axis}" for part in "ft" for axis in "xyz")
            case "std_msgs/Float64MultiArray":
                return tuple(f"{topic}.{i}" for i in range(self.size))
        return (topic,)

    @property
    def num_values(self) -> int:
        """How many numbers of the state this gives."""
        return len(self.names)


class ObservationConfig(Config):
    """What the policy sees."""

    images: dict[str, ImageSource] = Field(default={}, description="Camera name -> topic.")
    state: tuple[StateSource, ...] = Field(default=(), description="Topics whose numbers, joined, are the state.")
    instruction_topic: str = Field(default="", description="std_msgs/String with the instruction; empty: none.")
    reference: str = Field(
        default="",
        description="The camera, or state topic, whose newest message sets an observation's time; empty: the present.",
    )
    max_age: float = Field(
        default=0.25, gt=0, description="Seconds: older messages are refused on arrival, older observations not given."
    )

    @model_validator(mode="after")
    def _check_reference(self) -> ObservationConfig:
        if not self.images and not self.state:
            raise ConfigError("observation: needs at least one camera or state topic")
        topics = [s.topic for s in self.state]
        if len(set(topics)) < len(topics) or set(topics) & set(self.images):
            raise ConfigError(f"observation.state: {topics}: each topic once, and none named like a camera")
        known = [*self.images, *topics]
        if self.reference and self.reference not in known:
            raise ConfigError(f"observation.reference: got {self.reference!r}, allowed: {', '.join(known)}, or empty")
        return self

    @property
    def state_dim(self) -> int:
        return sum(s.num_values for s in self.state)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's numbers, each once: where two topics have one in common, the topic stands before it."""
        names = [(s.topic.strip("/").replace("/", "."), name) for s in self.state for name in s.names]
        count = Counter(name for _, name in names)
        return tuple(name if count[name] == 1 else f"{topic}.{name}" for topic, name in names)


class ActionSink(ChannelConfig):
    """A topic that takes some numbers of the action; or an action server, or a switch's service, that does."""

    type: Literal[
        "geometry_msgs/TwistStamped",
        "geometry_msgs/PoseStamped",
        "trajectory_msgs/JointTrajectory",
        "sensor_msgs/JointState",
        "control_msgs/JointJog",
        "std_msgs/Float64MultiArray",
        "std_msgs/Bool",
        "interbotix_xs_msgs/JointGroupCommand",
        "interbotix_xs_msgs/JointSingleCommand",
        "control_msgs/GripperCommand",
        "control_msgs/ParallelGripperCommand",
        "control_msgs/FollowJointTrajectory",
        "std_srvs/SetBool",
    ] = Field(
        description="Message type of the topic. GripperCommand, ParallelGripperCommand and FollowJointTrajectory are "
        "actions, SetBool is a service: `topic` is their name, and `goal` says when a goal is sent."
    )
    indices: tuple[int, ...] = Field(
        description="Which numbers of the action, in the message's order: linear x, y, z, angular x, y, z for a twist; "
        "x, y, z, axis-angle for a pose; one for each of `joints` for joint types."
    )
    joints: tuple[str, ...] = Field(
        default=(),
        description="Joint names: of trajectories, JointState and JointJog; ParallelGripperCommand has one.",
    )
    frame: str = Field(default="", description="The header's frame_id.")
    time_from_start: float = Field(
        default=0.1, gt=0, description="Trajectories: seconds until it is reached. JointJog: seconds it lasts."
    )
    threshold: float = Field(default=0.0, description="Bool and SetBool: true above this.")
    convert: ConversionConfig = ConversionConfig()
    goal: GoalConfig = GoalConfig()

    @property
    def is_goal(self) -> bool:
        """Whether it is an action's or a service's name, no topic."""
        return self.type in ACTIONS or self.type in SERVICES

    @model_validator(mode="after")
    def _check_indices(self) -> ActionSink:
        if not self.is_goal and self.goal != GoalConfig():
            raise ConfigError(f"{self.topic}: `goal` belongs to actions and services; {self.type} is a topic's message")
        needed = {
            **{"geometry_msgs/TwistStamped": 6, "geometry_msgs/PoseStamped": 6, "std_msgs/Bool": 1},
            **{"control_msgs/GripperCommand": 1, "control_msgs/ParallelGripperCommand": 1, "std_srvs/SetBool": 1},
        }.get(self.type)
        is_joints = self.type in JOINT_COMMANDS
        if is_joints != bool(self.joints):
            raise ConfigError(
                f"{self.topic}: `joints` belongs to joint messages, and is required there; got {self.type}"
            )
        if self.type.endswith(("/ParallelGripperCommand", "/JointSingleCommand")) and len(self.joints) != 1:
            raise ConfigError(f"{self.topic}: joints: {self.type} moves one joint, got {list(self.joints)}")
        needed = len(self.joints) if is_joints else needed or len(self.indices)
        if len(self.indices) != needed or not self.indices or min(self.indices) < 0:
            raise ConfigError(
                f"{self.topic}: indices: {self.type} needs {needed} of 0 or more, got {list(self.indices)}"
            )
        _check_lengths(self.topic, self.convert, len(self.indices))
        return self


def _check_lengths(topic: str, convert: ConversionConfig, num_values: int) -> None:
    for name in ("scale", "offset"):
        value = getattr(convert, name)
        if isinstance(value, tuple) and len(value) != num_values:
            raise ConfigError(f"{topic}: convert.{name}: one number, or {num_values}; got {len(value)}")
