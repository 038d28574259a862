"""The contract of one robot: which topic holds which part of an observation, and where each part of an action goes.

One YAML file a robot, read by `load_contract`. Shipped ones are in `real_robot/bridge/contracts/`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from real_robot.bridge.cameras import CameraConfig
from real_robot.bridge.contract_checks import check_limits
from real_robot.bridge.messages import MESSAGES, Message
from real_robot.bridge.ros.action_types import ACTIONS, SERVICES
from real_robot.bridge.ros.goals import GoalConfig
from real_robot.bridge.transports.base import QosConfig, TransportConfig
from real_robot.bridge.transports.configs import Ros1Config
from real_robot.control.execution import ExecutionConfig
from real_robot.control.safety_config import SafetyConfig
from real_robot.failure.watch_config import WatchConfig
from real_robot.finite_config import FiniteConfig
from real_robot.guard.config import GuardConfig
from real_robot.kinematics.config import ModelConfig
from real_robot.kinematics.limits import apply_limits, prepare_limits
from real_robot.operator.teleop import TeleopConfig
from real_robot.operator.topics import EpisodeServices, OperatorTopics
from vla_rl.config import Config, ConfigError, apply_overrides, component, read_yaml, validate

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


class AlignConfig(FiniteConfig):
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


class ChannelConfig(FiniteConfig):
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
    swap_red_blue: bool = Field(
        default=False, description="Swap red and blue, for drivers that compress BGR pictures as if they were RGB."
    )

    @model_validator(mode="after")
    def _check_camera(self) -> ImageSource:
        if bool(self.topic) == (self.camera is not None):
            raise ConfigError(f"observation.images: each has a `topic` or a `camera`, one of them; got {self.topic!r}")
        return self


class ConversionConfig(FiniteConfig):
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
    quantity: Literal["position", "velocity", "effort"] = Field(default="position", description="JointState: of what.")
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
                return (
                    self.joints if self.quantity == "position" else tuple(f"{j}.{self.quantity}" for j in self.joints)
                )
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


class ObservationConfig(FiniteConfig):
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


class StartCall(Config):
    """A service that is called once, before the first command."""

    service: str = Field(description="Service name, such as /servo_node/start_servo.")
    type: Literal["std_srvs/Trigger", "std_srvs/SetBool"] = Field(description="Service type.")
    data: bool = Field(default=True, description="SetBool: what is said.")


class RobotContract(FiniteConfig):
    """One robot: its rate, its topics, its limits."""

    name: str = Field(description="The robot's name, for logs and datasets.")
    rate: float = Field(default=20.0, gt=0, le=1000, description="Control ticks per second.")
    pace: Literal["clock", "reference"] = Field(
        default="clock",
        description="clock: a tick every 1 / rate seconds. reference: a tick at each new message of "
        "observation.reference, for robots that publish at their control rate; 1 / rate seconds then is the norm.",
    )
    pace_timeout: float = Field(
        default=0.0, ge=0, description="pace reference: seconds after which a tick comes anyway; 0: two periods."
    )
    transport: Annotated[SerializeAsAny[TransportConfig], component("transport")] = Field(
        default=Ros1Config(),
        description="How the robot is reached: ros1, ros2, rclpy, rosbridge, lerobot, or package.module:Class.",
    )
    observation: ObservationConfig = Field(description="What is read.")
    action: tuple[ActionSink, ...] = Field(description="What is sent.", min_length=1)
    start: tuple[StartCall, ...] = Field(
        default=(), description="Services that are called, in this order, before anything is sent; each must succeed."
    )
    operator: OperatorTopics = OperatorTopics()
    episode: EpisodeServices = Field(
        default=EpisodeServices(), description="Services that are called where a person's episode begins."
    )
    other_publishers: tuple[str, ...] = Field(
        default=(),
        description="Nodes that may publish on the action topics too, such as a multiplexer's other inputs; `*`: any. "
        "Otherwise deploy is refused while another publisher is there.",
    )
    guard: GuardConfig = Field(default=GuardConfig(), description="How `vla-rl robot-guard` guards it.")
    safety: SafetyConfig = Field(description="Limits of each number of the action, in the action's own units.")
    model: ModelConfig | None = Field(
        default=None, description="The robot's URDF or MJCF, for joint limits and to keep it out of collisions."
    )
    execution: ExecutionConfig = Field(description="How chunks of actions become a stream.")
    teleop: TeleopConfig = Field(default=TeleopConfig(), description="How a person's keys or gamepad drive it.")
    failure: WatchConfig = Field(default=WatchConfig(), description="How it heeds its failure detector, if it has one.")
    silence: float = Field(
        default=2.0,
        gt=0,
        description="Seconds without an observation, or without an action, after which the robot is stopped until a "
        "person resets it. It holds much earlier: observation.max_age, safety.command_timeout.",
    )

    @model_validator(mode="after")
    def _check_actions(self) -> RobotContract:
        used = sorted(i for sink in self.action for i in sink.indices)
        if used != list(range(len(used))):
            raise ConfigError(f"action: indices: together they must be 0, 1, 2, ... each once; got {used}")
        if len(self.safety.dimensions) != len(used):
            raise ConfigError(
                f"safety.dimensions: {len(self.safety.dimensions)} entries for {len(used)} numbers of the action"
            )
        for name, told in (("safety", self.safety.control_hz), ("execution", self.execution.control_hz)):
            if told != self.rate:
                raise ConfigError(f"{name}.control_hz: {told:g}, but rate is {self.rate:g}; leave it out")
        self._check_deadman()
        if self.guard.timeout is not None and self.guard.timeout < 2 / self.rate:
            raise ConfigError(
                f"guard.timeout: {self.guard.timeout:g} s is less than two control ticks ({2 / self.rate:g} s): "
                "it would brake between commands"
            )
        if self.pace == "reference" and not self.observation.reference:
            raise ConfigError("pace: `reference` needs observation.reference")
        check_limits(self)
        return self

    def _check_deadman(self) -> None:
        topic, needed = self.operator.deadman, self.safety.deadman
        if topic and not needed:
            raise ConfigError(
                f"operator.deadman: {topic}, but safety.deadman is false, so that the robot would move whether the "
                "switch is held or not; set safety.deadman: true, or leave the topic out"
            )
        if needed and not topic:
            raise ConfigError(
                "safety.deadman: true, but no operator.deadman names the switch's topic, so that the robot could never "
                "move; name it, or set safety.deadman: false (driving from the console has its own)"
            )

    @property
    def action_dim(self) -> int:
        return sum(len(sink.indices) for sink in self.action)

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the action's numbers."""
        return tuple(d.name for d in self.safety.dimensions)


def load_contract(name: str | Path, overrides: Iterable[str] = ()) -> RobotContract:
    """A contract by path, or by the name of one that ships, with `key=value` overrides on top.

    Raises:
        ConfigError: no such file, not YAML, or a wrong key or value (the message names it); or the file of
            `model` cannot be used.
    """
    path = _find(name)
    values: dict[str, Any] = apply_overrides(read_yaml(path), overrides)
    rate = values.setdefault("rate", RobotContract.model_fields["rate"].default)
    for section in ("safety", "execution"):
        if isinstance(values.setdefault(section, {}), dict):
            values[section] = {"control_hz": rate, **values[section]}
    prepare_limits(values, path.parent)
    return apply_limits(validate(RobotContract, values))


def shipped_contracts() -> dict[str, Path]:
    """Name -> file of the contracts that ship with the package."""
    return {p.stem: p for p in sorted((Path(__file__).parent / "contracts").glob("*.yaml"))}


def is_contract(name: str) -> bool:
    """Whether this names a robot's contract, and not a recipe: a shipped one, or a file with observation and action."""
    if Path(name).is_file():
        values = read_yaml(Path(name))
        return isinstance(values, dict) and {"observation", "action"} <= set(values)
    return Path(name).parent == Path(".") and Path(name).stem in shipped_contracts()


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_contracts()
    if path.parent == Path(".") and path.stem in shipped and path.suffix in ("", ".yaml"):
        return shipped[path.stem]
    nearest = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"robot contract not found: {name}.{hint} Shipped: {', '.join(shipped)}.")


def _check_lengths(topic: str, convert: ConversionConfig, num_values: int) -> None:
    for name in ("scale", "offset"):
        value = getattr(convert, name)
        if isinstance(value, tuple) and len(value) != num_values:
            raise ConfigError(f"{topic}: convert.{name}: one number, or {num_values}; got {len(value)}")
