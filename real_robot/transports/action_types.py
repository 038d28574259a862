"""What actions and services ask and answer: control_msgs' and std_srvs' messages, the same for ROS 1 and 2."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from real_robot.transports.messages import (
    JointState,
    JointTrajectory,
    Message,
    Tree,
    from_time,
    read_names,
    read_numbers,
    read_text,
    to_time,
)


@dataclass(frozen=True, kw_only=True)
class _Plain(Message):
    """Base of messages without a header of their own."""

    HAS_HEADER: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class NamedMessage(_Plain):
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
class GripperCommandGoal(_Plain):
    """control_msgs/GripperCommand's goal: `position`, the gap in meters, and `max_effort` in newtons."""

    TYPE: ClassVar[str] = "control_msgs/action/GripperCommand_Goal"
    position: float
    max_effort: float = 0.0

    @property
    def numbers(self) -> np.ndarray:
        return np.array([self.position])

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {name: float(tree["command"][name]) for name in ("position", "max_effort")}

    def _write(self) -> Tree:
        return {"command": {"position": float(self.position), "max_effort": float(self.max_effort)}}


@dataclass(frozen=True, kw_only=True)
class GripperCommandResult(_Plain):
    """control_msgs/GripperCommand's result, and its feedback: `position` in meters, `effort` in newtons."""

    TYPE: ClassVar[str] = "control_msgs/action/GripperCommand_Result"
    position: float
    effort: float
    stalled: bool
    reached_goal: bool

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        flags = {name: bool(tree[name]) for name in ("stalled", "reached_goal")}
        return {"position": float(tree["position"]), "effort": float(tree["effort"]), **flags}

    def _write(self) -> Tree:
        return {name: getattr(self, name) for name in ("position", "effort", "stalled", "reached_goal")}


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandGoal(_Plain):
    """control_msgs/ParallelGripperCommand's goal: a JointState of one joint, its effort where limited."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Goal"
    command: JointState

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.command.position, np.float64)

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"command": JointState.from_tree(tree["command"])}

    def _write(self) -> Tree:
        return {"command": self.command.tree()}


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandResult(_Plain):
    """control_msgs/ParallelGripperCommand's result: the joint's state, and whether it stalled."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Result"
    state: JointState
    stalled: bool
    reached_goal: bool

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        flags = {name: bool(tree[name]) for name in ("stalled", "reached_goal")}
        return {"state": JointState.from_tree(tree["state"]), **flags}

    def _write(self) -> Tree:
        return {"state": self.state.tree(), "stalled": self.stalled, "reached_goal": self.reached_goal}


@dataclass(frozen=True, kw_only=True)
class ParallelGripperCommandFeedback(_Plain):
    """control_msgs/ParallelGripperCommand's feedback: the joint's state."""

    TYPE: ClassVar[str] = "control_msgs/action/ParallelGripperCommand_Feedback"
    state: JointState

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"state": JointState.from_tree(tree["state"])}


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryGoal(_Plain):
    """control_msgs/FollowJointTrajectory's goal, with the controller's own tolerances. `time_tolerance`: ns."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Goal"
    trajectory: JointTrajectory
    time_tolerance: int = 0

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.trajectory.positions, np.float64).ravel()

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        trajectory = JointTrajectory.from_tree(tree["trajectory"])
        return {"trajectory": trajectory, "time_tolerance": from_time(tree["goal_time_tolerance"])}

    def _write(self) -> Tree:
        return {"trajectory": self.trajectory.tree(), "goal_time_tolerance": to_time(self.time_tolerance)}


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryResult(_Plain):
    """control_msgs/FollowJointTrajectory's result: 0, or why not."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Result"
    error_code: int
    error_string: str = ""

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"error_code": int(tree["error_code"]), "error_string": read_text(tree["error_string"])}

    def _write(self) -> Tree:
        return {"error_code": self.error_code, "error_string": self.error_string}


@dataclass(frozen=True, kw_only=True)
class FollowJointTrajectoryFeedback(_Plain):
    """control_msgs/FollowJointTrajectory's feedback: positions (J,) wanted and measured."""

    TYPE: ClassVar[str] = "control_msgs/action/FollowJointTrajectory_Feedback"
    joint_names: tuple[str, ...]
    desired: np.ndarray
    actual: np.ndarray

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        positions = {part: read_numbers(tree[part]["positions"]) for part in ("desired", "actual")}
        return {"joint_names": read_names(tree["joint_names"]), **positions}


@dataclass(frozen=True, kw_only=True)
class TriggerRequest(_Plain):
    """std_srvs/Trigger's request, which is empty; ROS 2 sends one byte."""

    TYPE: ClassVar[str] = "std_srvs/srv/Trigger_Request"

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {}

    def _write(self) -> Tree:
        return {"structure_needs_at_least_one_member": 0}


@dataclass(frozen=True, kw_only=True)
class SetBoolRequest(_Plain):
    """std_srvs/SetBool's request."""

    TYPE: ClassVar[str] = "std_srvs/srv/SetBool_Request"
    data: bool

    @property
    def numbers(self) -> np.ndarray:
        return np.array([float(self.data)])

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"data": bool(tree["data"])}

    def _write(self) -> Tree:
        return {"data": self.data}


@dataclass(frozen=True, kw_only=True)
class ServiceDone(_Plain):
    """The answer of std_srvs/Trigger and SetBool."""

    success: bool
    message: str = ""

    @classmethod
    def _read(cls, tree: Mapping[str, Any]) -> Tree:
        return {"success": bool(tree["success"]), "message": read_text(tree["message"])}

    def _write(self) -> Tree:
        return {"success": self.success, "message": self.message}


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
