"""The contract of one robot: which topic holds which part of an observation, and where each part of an action goes.

One YAML file a robot, read by `load_contract`. Shipped ones are in `real_robot/contract/robots/`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, model_validator

from real_robot.contract.channels import ActionSink, ObservationConfig
from real_robot.contract.model import ModelConfig
from real_robot.contract.safety import SafetyConfig
from real_robot.contract.sections import (
    EpisodeServices,
    ExecutionConfig,
    GuardConfig,
    OperatorTopics,
    StartCall,
    TeleopConfig,
    WatchConfig,
)
from real_robot.transports.base import Transport, TransportConfig
from real_robot.transports.rclpy_node import RclpyConfig
from real_robot.transports.ros1 import Ros1Config
from vla_rl.config import Config, ConfigError, component


class RobotContract(Config):
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
    guard: GuardConfig = Field(default=GuardConfig(), description="How `vla-rl robot guard` guards it.")
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
        _check_limits(self)
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

    def open_transport(self, role: str) -> Transport:
        """Connect to the robot, as a node that is named after what this process is.

        Raises:
            TransportError: it cannot be reached.
        """
        transport = self.transport
        return transport.open(role) if isinstance(transport, Ros1Config | RclpyConfig) else transport.open()

    @property
    def action_dim(self) -> int:
        return sum(len(sink.indices) for sink in self.action)

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the action's numbers."""
        return tuple(d.name for d in self.safety.dimensions)


KINDS = {
    **dict.fromkeys(("geometry_msgs/TwistStamped", "control_msgs/JointJog"), "velocity"),
    **dict.fromkeys(("geometry_msgs/PoseStamped", "trajectory_msgs/JointTrajectory"), "position"),
    **dict.fromkeys(("control_msgs/FollowJointTrajectory", "control_msgs/GripperCommand"), "position"),
    "control_msgs/ParallelGripperCommand": "position",
}  # of what these messages hold; the others hold what their driver takes them for


def _check_limits(contract: RobotContract) -> None:
    """
    Raises:
        ConfigError: a speed under the limits of a set-point, or the reverse: a hold would move the robot; a number of
            the state or the action that is not there; or a workspace in another unit, or direction, than its commands.
    """
    _check_numbers(contract)
    for sink in contract.action:
        for place, number in enumerate(sink.indices):
            _check_kind(contract, sink, place, number)
    _check_workspace(contract)


def _check_numbers(contract: RobotContract) -> None:
    size, box = contract.observation.state_dim, contract.safety.workspace
    read = [(f"safety.dimensions: {d.name}: state", d.state) for d in contract.safety.dimensions if d.state is not None]
    read += [("safety.workspace.state", number) for number in (box.state if box else ())]
    asked = [("execution.unblended", number) for number in contract.execution.unblended]
    for what, numbers, most in (("observation.state", read, size), ("the action", asked, contract.action_dim)):
        for name, number in numbers:
            if not 0 <= number < most:
                there = f"the numbers 0 to {most - 1}" if most else "no numbers"
                raise ConfigError(f"{name}: {number}; {what} has {there}")


def _check_kind(contract: RobotContract, sink: ActionSink, place: int, number: int) -> None:
    limits = contract.safety.dimensions[number]
    kind = KINDS.get(sink.type, limits.kind)
    if limits.kind != kind:
        does = "go on at its last speed" if kind == "velocity" else "be sent to 0"
        raise ConfigError(
            f"safety.dimensions: {limits.name}: kind {limits.kind}, but {sink.topic} ({sink.type}) takes it for a "
            f"{kind}: a robot that is to hold would {does}; set kind: {kind}"
        )
    _, offset = sink.convert.of(place)
    if limits.kind == "velocity" and offset:
        raise ConfigError(
            f"action: {sink.topic}: convert.offset: {offset:g} for {limits.name}, a velocity: a robot that is to hold, "
            "at 0, would be told to move; leave it out"
        )


def _check_workspace(contract: RobotContract) -> None:
    box = contract.safety.workspace
    if box is None or box.commands is None:
        return
    told = {number: (sink, place) for sink in contract.action for place, number in enumerate(sink.indices)}
    seen = [(source, place) for source in contract.observation.state for place in range(source.num_values)]
    for number, measured in zip(box.commands, box.state, strict=True):
        (sink, there), (source, here), limits = told[number], seen[measured], contract.safety.dimensions[number]
        (scale, offset), (factor, shift) = sink.convert.of(there), source.convert.of(here)
        frames = [name.lstrip("/") for name in (sink.frame, source.frame)]
        if all(frames) and frames[0] != frames[1]:
            raise ConfigError(
                f"safety.workspace.commands: {limits.name} is sent in the frame {sink.frame!r} ({sink.topic}), and "
                f"measured in {source.frame!r} ({source.topic}): the box needs both in the same frame"
            )
        if limits.kind == "velocity":
            if not scale * factor > 0:
                raise ConfigError(
                    f"safety.workspace.commands: {limits.name} is sent with convert.scale {scale:g}, and its place "
                    f"measured with {factor:g}: above 0 it would move down, so the box would be watched on the wrong "
                    "side; give both the same sign, or leave commands out"
                )
            continue
        if not np.allclose([scale * factor, offset * factor + shift], [1, 0], atol=1e-6):
            raise ConfigError(
                f"safety.workspace.commands: {limits.name} is sent with convert {scale:g} * x + {offset:g}, and "
                f"measured with {factor:g} * x + {shift:g}: the box needs both in the same unit"
            )
