"""Messages of ROS actions and services: control_msgs' and std_srvs', the same for ROS 1 and 2."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from real_robot.transports.messages import (
    Flag,
    Float,
    Int,
    JointState,
    JointTrajectory,
    Message,
    Names,
    Nanoseconds,
    Plain,
    Text,
    Tree,
    Wire,
    read_numbers,
)

Joints = Annotated[JointState, Wire(JointState.from_tree, JointState.tree)]
Trajectory = Annotated[JointTrajectory, Wire(JointTrajectory.from_tree, JointTrajectory.tree)]
Positions = Annotated[np.ndarray, Wire(lambda point: read_numbers(point["positions"]), lambda v: {"positions": v})]


@dataclass(frozen=True, kw_only=True)
class NamedMessage(Plain):
    """A message known by its type's name alone, kept as its tree: the envelopes of actions."""

    fields: Tree

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"fields": dict(tree)}

    def _write(self) -> Tree:
        return self.fields


@functools.cache
def message_named(name: str) -> type[NamedMessage]:
    """The message type of that name: "package/Name", or "package/action/Name" for parts of ROS 2's actions."""
    return type(name.rpartition("/")[2], (NamedMessage,), {"TYPE": name})


@dataclass(frozen=True, kw_only=True)
class GripperCommandGoal(Plain):
    """control_msgs/GripperCommand's goal: `position`, the gap in meters, and `max_effort` in newtons."""

    TYPE: ClassVar[str] = "control_msgs/action/GripperCommand_Goal"
    UNDER: ClassVar[str] = "command"
    position: Float
    max_effort: Float = 0.0

    @property
    def numbers(self) -> np.ndarray:
        return np.array([self.position])


@dataclass(frozen=True, kw_only=True)
class GripperCommandResult(Plain):
    """control_msgs/GripperCommand's result, and its feedback: `position` in meters, `effort` in newtons."""

    TYPE: ClassVar[str] = "control_msgs/action/GripperCommand_Result"
    position: Float
    effort: Float
    stalled: Flag
    reached_goal: Flag


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandGoal(Plain):
    """control_msgs/ParallelGripperCommand's goal: a JointState of one joint, its effort where limited."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Goal"
    command: Joints

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.command.position, np.float64)


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandResult(Plain):
    """control_msgs/ParallelGripperCommand's result: the joint's state, and whether it stalled."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Result"
    state: Joints
    stalled: Flag
    reached_goal: Flag


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandFeedback(Plain):
    """control_msgs/ParallelGripperCommand's feedback: the joint's state."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Feedback"
    state: Joints


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryGoal(Plain):
    """control_msgs/FollowJointTrajectory's goal, with the controller's own tolerances. `goal_time_tolerance`: ns."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Goal"
    trajectory: Trajectory
    goal_time_tolerance: Nanoseconds = 0

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.trajectory.positions, np.float64).ravel()


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryResult(Plain):
    """control_msgs/FollowJointTrajectory's result: 0, or why not."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Result"
    error_code: Int
    error_string: Text = ""


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryFeedback(Plain):
    """control_msgs/FollowJointTrajectory's feedback: positions (J,) wanted and measured."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Feedback"
    joint_names: Names
    desired: Positions
    actual: Positions


@dataclass(frozen=True, kw_only=True)
class TriggerRequest(Plain):
    """std_srvs/Trigger's request, which is empty; ROS 2 sends one byte."""

    TYPE: ClassVar[str] = "std_srvs/srv/Trigger_Request"
    CONSTANT: ClassVar[Tree] = {"structure_needs_at_least_one_member": 0}


@dataclass(frozen=True, kw_only=True)
class SetBoolRequest(Plain):
    """std_srvs/SetBool's request."""

    TYPE: ClassVar[str] = "std_srvs/srv/SetBool_Request"
    data: Flag

    @property
    def numbers(self) -> np.ndarray:
        return np.array([float(self.data)])


@dataclass(frozen=True, kw_only=True)
class ServiceDone(Plain):
    """The answer of std_srvs/Trigger and SetBool."""

    success: Flag
    message: Text = ""


class TriggerResponse(ServiceDone):
    """std_srvs/Trigger's answer."""

    TYPE: ClassVar[str] = "std_srvs/srv/Trigger_Response"


class SetBoolResponse(ServiceDone):
    """std_srvs/SetBool's answer."""

    TYPE: ClassVar[str] = "std_srvs/srv/SetBool_Response"


GoalMessage = GripperCommandGoal | ParallelGripperCommandGoal | FollowJointTrajectoryGoal | SetBoolRequest


@dataclass(frozen=True)
class ActionType:
    """An action's name, such as control_msgs/GripperCommand, and its three messages."""

    name: str
    goal: type[Message]
    result: type[Message]
    feedback: type[Message]

    def ros1(self, part: str) -> type[NamedMessage]:
        """ROS 1's envelope: ActionGoal, ActionResult or ActionFeedback."""
        return message_named(self.name + part)

    def ros2(self, part: str) -> type[NamedMessage]:
        """ROS 2's: SendGoal_Request, GetResult_Response, FeedbackMessage, ..."""
        return message_named(f"{self.name.replace('/', '/action/')}_{part}")


@dataclass(frozen=True)
class ServiceType:
    """A service's name, such as std_srvs/Trigger, its request and its response."""

    name: str
    request: type[Message]
    response: type[Message]


ACTIONS = {
    action.name: action
    for action in (
        ActionType("control_msgs/GripperCommand", GripperCommandGoal, GripperCommandResult, GripperCommandResult),
        ActionType(
            "control_msgs/ParallelGripperCommand",
            ParallelGripperCommandGoal,
            ParallelGripperCommandResult,
            ParallelGripperCommandFeedback,
        ),
        ActionType(
            "control_msgs/FollowJointTrajectory",
            FollowJointTrajectoryGoal,
            FollowJointTrajectoryResult,
            FollowJointTrajectoryFeedback,
        ),
    )
}
SERVICES = {
    service.name: service
    for service in (
        ServiceType("std_srvs/Trigger", TriggerRequest, TriggerResponse),
        ServiceType("std_srvs/SetBool", SetBoolRequest, SetBoolResponse),
    )
}
