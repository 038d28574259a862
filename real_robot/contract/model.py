"""The `model` section of a robot's contract: its URDF or MJCF, the cell around it, and how near it may come."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from vla_rl.config import Config, ConfigError

Vector = tuple[float, float, float]


class Box(Config):
    """A thing of the cell, as a box that stands still, in the frame of the file's root."""

    name: str = Field(min_length=1, description="What it is, for messages.")
    center: Vector = Field(description="Its middle x, y, z, in meters.")
    size: Vector = Field(description="Its whole lengths along x, y, z, in meters.")
    turn: Vector = Field(default=(0.0, 0.0, 0.0), description="Roll, pitch, yaw in radians, as in a URDF's rpy.")

    @model_validator(mode="after")
    def _check(self) -> Box:
        if min(self.size) <= 0:
            raise ConfigError(f"model.boxes: {self.name}: size: lengths above 0, in meters; got {list(self.size)}")
        return self


class Plane(Config):
    """A wall, a floor or a table top without end: the robot stays on the side that `normal` points to."""

    name: str = Field(min_length=1, description="What it is, for messages.")
    point: Vector = Field(description="A point of it x, y, z, in meters, in the frame of the file's root.")
    normal: Vector = Field(default=(0.0, 0.0, 1.0), description="Direction from it to where the robot may be.")

    @model_validator(mode="after")
    def _check(self) -> Plane:
        if not any(self.normal):
            raise ConfigError(f"model.planes: {self.name}: normal: a direction, got {list(self.normal)}")
        return self


class JointName(Config):
    """A joint of the file that a name, or a number, stands for: its position is scale * number + offset."""

    joint: str = Field(description="Name of the joint in the file.")
    scale: float = Field(default=1.0, description="The file's radians (meters) per unit: 0.0174533 for degrees.")
    offset: float = Field(default=0.0, description="Added after scaling, in radians (meters).")

    @model_validator(mode="after")
    def _check(self) -> JointName:
        if self.scale == 0:
            raise ConfigError(f"model: joint {self.joint}: scale must not be 0")
        return self


def _joint_name(value: Any) -> Any:
    return {"joint": value} if isinstance(value, str) else value


Joint = Annotated[JointName, BeforeValidator(_joint_name)]


class ModelConfig(Config):
    """The robot's file, and what is checked with it."""

    file: str = Field(description="URDF or MJCF; relative to the contract's file.")
    packages: dict[str, str] = Field(
        default={}, description="Folder of each ROS package that the URDF's meshes name; else they are searched for."
    )
    joints: dict[str, Joint | None] = Field(
        default={},
        description="Name of a joint in the contract's messages -> that of the file, or {joint, scale, offset} where "
        "units differ, or null where the file lacks it. Others mean the file's joint of the same name.",
    )
    commands: dict[int, Joint] = Field(
        default={}, description="Number of the action -> joint, where the message has no names (Float64MultiArray)."
    )
    states: dict[int, Joint] = Field(default={}, description="Number of the state -> joint, where it has none.")
    fixed: dict[str, float] = Field(
        default={}, description="Joints that are neither commanded nor measured -> the position to assume: the widest."
    )
    margin: float = Field(default=0.05, ge=0, description="Radians that joints keep from the file's limits.")
    slide_margin: float = Field(default=0.0, ge=0, description="The same for slides, as of grippers, in meters.")
    margins: dict[str, float] = Field(
        default={}, description="Joint -> margin of its own, as 0 for a gripper's hinge that must close."
    )
    end_effector: str = Field(default="", description="Link whose twist is commanded; needed for twists alone.")
    twist_frame: str = Field(
        default="", description="Link in whose frame twists are; empty: their topic's frame, else the root."
    )
    twist_scale: tuple[float, float] = Field(
        default=(1.0, 1.0),
        description="Meters per second and radians per second that 1 in a twist message means: (0.4, 0.8) for MoveIt "
        "Servo's unitless twists.",
    )
    boxes: tuple[Box, ...] = Field(default=(), description="Things around the robot.")
    planes: tuple[Plane, ...] = Field(default=(), description="Floors and walls.")
    min_distance: float = Field(
        default=0.01, ge=0, le=0.5, description="Meters that parts of the robot keep from each other and from the cell."
    )
    allowed: tuple[tuple[str, str], ...] = Field(
        default=(), description="Pairs of links, boxes or planes that may touch, beside those found by themselves."
    )
    neutral: dict[str, float] = Field(
        default={},
        description="Joint -> position of a pose in which no two links collide. Links that touch there are taken for "
        "neighbors. Joints that are not here: as in the MJCF's keyframe home, else the middle of their range.",
    )
    max_condition: float | None = Field(
        default=30.0,
        gt=1,
        description="Twists: largest condition number of the end effector's Jacobian, in meters and radians (MoveIt "
        "Servo's measure and default); motion that raises it further is refused. null: not checked.",
    )
    joint_states: str = Field(
        default="",
        description="sensor_msgs/JointState topic that measures the joints, and their efforts, for these checks alone; "
        "needed where the observed state does not have them.",
    )
    max_effort: dict[str, float] = Field(
        default={}, description="Joint -> largest measured effort, Nm (N); beyond it it holds. Needs joint_states."
    )
    effort_share: float | None = Field(
        default=None,
        gt=0,
        description="Share of the file's effort limits that efforts may reach; null: only those of max_effort.",
    )

    def joint_of(self, name: str) -> JointName | None:
        """Which joint of the file a name in messages stands for; None: it lacks it."""
        return self.joints.get(name, JointName(joint=name))

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        names = [thing.name for thing in (*self.boxes, *self.planes)]
        if len(set(names)) < len(names):
            raise ConfigError(f"model: boxes and planes: names must differ, got {', '.join(names)}")
        for joint, margin in self.margins.items():
            if not margin >= 0:
                raise ConfigError(f"model.margins: {joint}: 0 or more, got {margin:g}")
        for joint, effort in self.max_effort.items():
            if not effort > 0:
                raise ConfigError(f"model.max_effort: {joint}: above 0, got {effort:g}")
        if (self.max_effort or self.effort_share is not None) and not self.joint_states:
            raise ConfigError("model.max_effort, effort_share: efforts come from model.joint_states; name its topic")
        return self

    def margin_of(self, joint: str, is_slide: bool) -> float:
        """Radians, or meters for a slide, that a joint keeps from the file's limits."""
        return self.margins.get(joint, self.slide_margin if is_slide else self.margin)
