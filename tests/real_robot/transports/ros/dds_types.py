"""ROS 2's types of actions and services, written by hand for plain cyclonedds from the packages' definitions.

A request or response of a service begins with the caller's identity and number, as rmw_cyclonedds_cpp lays it out.
"""

# Without `from __future__ import annotations`: cyclonedds reads the annotations of its types.

from dataclasses import dataclass, field

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float64, int8, int32, int64, sequence, uint8, uint16, uint32, uint64


@dataclass
class Time(IdlStruct, typename="builtin_interfaces.msg.dds_.Time_"):
    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces.msg.dds_.Duration_"):
    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Header(IdlStruct, typename="std_msgs.msg.dds_.Header_"):
    stamp: Time = field(default_factory=Time)
    frame_id: str = ""


@dataclass
class JointState(IdlStruct, typename="sensor_msgs.msg.dds_.JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Uuid(IdlStruct, typename="unique_identifier_msgs.msg.dds_.UUID_"):
    uuid: array[uint8, 16]


@dataclass
class GoalInfo(IdlStruct, typename="action_msgs.msg.dds_.GoalInfo_"):
    goal_id: Uuid
    stamp: Time


@dataclass
class CancelRequest(IdlStruct, typename="action_msgs.srv.dds_.CancelGoal_Request_"):
    client: uint64
    number: int64
    goal_info: GoalInfo


@dataclass
class CancelResponse(IdlStruct, typename="action_msgs.srv.dds_.CancelGoal_Response_"):
    client: uint64
    number: int64
    return_code: int8
    goals_canceling: sequence[GoalInfo]


# --- GripperCommand ------------------------------------------------------------------------------------


@dataclass
class GripperCommand(IdlStruct, typename="control_msgs.msg.dds_.GripperCommand_"):
    position: float64
    max_effort: float64


@dataclass
class GripperGoal(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_Goal_"):
    command: GripperCommand


@dataclass
class GripperSend(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_SendGoal_Request_"):
    client: uint64
    number: int64
    goal_id: Uuid
    goal: GripperGoal


@dataclass
class GripperSent(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_SendGoal_Response_"):
    client: uint64
    number: int64
    accepted: bool
    stamp: Time


@dataclass
class GripperGet(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_GetResult_Request_"):
    client: uint64
    number: int64
    goal_id: Uuid


@dataclass
class GripperResult(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_Result_"):
    position: float64 = 0.0
    effort: float64 = 0.0
    stalled: bool = False
    reached_goal: bool = False


@dataclass
class GripperGot(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_GetResult_Response_"):
    client: uint64
    number: int64
    status: int8
    result: GripperResult


@dataclass
class GripperFeedback(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_Feedback_"):
    position: float64 = 0.0
    effort: float64 = 0.0
    stalled: bool = False
    reached_goal: bool = False


@dataclass
class GripperFeedbackMessage(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_FeedbackMessage_"):
    goal_id: Uuid
    feedback: GripperFeedback


@dataclass
class ParallelGoal(IdlStruct, typename="control_msgs.action.dds_.ParallelGripperCommand_Goal_"):
    command: JointState


# --- FollowJointTrajectory -----------------------------------------------------------------------------


@dataclass
class Point(IdlStruct, typename="trajectory_msgs.msg.dds_.JointTrajectoryPoint_"):
    positions: sequence[float64] = field(default_factory=list)
    velocities: sequence[float64] = field(default_factory=list)
    accelerations: sequence[float64] = field(default_factory=list)
    effort: sequence[float64] = field(default_factory=list)
    time_from_start: Duration = field(default_factory=Duration)


@dataclass
class Trajectory(IdlStruct, typename="trajectory_msgs.msg.dds_.JointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[Point]


@dataclass
class JointJog(IdlStruct, typename="control_msgs.msg.dds_.JointJog_"):
    header: Header
    joint_names: sequence[str]
    displacements: sequence[float64]
    velocities: sequence[float64]
    duration: float64


@dataclass
class Vector3(IdlStruct, typename="geometry_msgs.msg.dds_.Vector3_"):
    x: float64
    y: float64
    z: float64


@dataclass
class Quaternion(IdlStruct, typename="geometry_msgs.msg.dds_.Quaternion_"):
    x: float64
    y: float64
    z: float64
    w: float64


@dataclass
class Transform(IdlStruct, typename="geometry_msgs.msg.dds_.Transform_"):
    translation: Vector3
    rotation: Quaternion


@dataclass
class Twist(IdlStruct, typename="geometry_msgs.msg.dds_.Twist_"):
    linear: Vector3
    angular: Vector3


@dataclass
class MultiPoint(IdlStruct, typename="trajectory_msgs.msg.dds_.MultiDOFJointTrajectoryPoint_"):
    transforms: sequence[Transform] = field(default_factory=list)
    velocities: sequence[Twist] = field(default_factory=list)
    accelerations: sequence[Twist] = field(default_factory=list)
    time_from_start: Duration = field(default_factory=Duration)


@dataclass
class MultiTrajectory(IdlStruct, typename="trajectory_msgs.msg.dds_.MultiDOFJointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[MultiPoint]


@dataclass
class Tolerance(IdlStruct, typename="control_msgs.msg.dds_.JointTolerance_"):
    name: str
    position: float64
    velocity: float64
    acceleration: float64


@dataclass
class ComponentTolerance(IdlStruct, typename="control_msgs.msg.dds_.JointComponentTolerance_"):
    joint_name: str
    component: uint16
    position: float64
    velocity: float64
    acceleration: float64


@dataclass
class ArmGoal(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_Goal_"):
    trajectory: Trajectory
    multi_dof_trajectory: MultiTrajectory
    path_tolerance: sequence[Tolerance]
    component_path_tolerance: sequence[ComponentTolerance]
    goal_tolerance: sequence[Tolerance]
    component_goal_tolerance: sequence[ComponentTolerance]
    goal_time_tolerance: Duration


@dataclass
class ArmSend(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_SendGoal_Request_"):
    client: uint64
    number: int64
    goal_id: Uuid
    goal: ArmGoal


@dataclass
class ArmSent(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_SendGoal_Response_"):
    client: uint64
    number: int64
    accepted: bool
    stamp: Time


@dataclass
class ArmGet(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_GetResult_Request_"):
    client: uint64
    number: int64
    goal_id: Uuid


@dataclass
class ArmResult(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_Result_"):
    error_code: int32 = 0
    error_string: str = ""


@dataclass
class ArmGot(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_GetResult_Response_"):
    client: uint64
    number: int64
    status: int8
    result: ArmResult


@dataclass
class ArmFeedback(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_Feedback_"):
    header: Header
    joint_names: sequence[str]
    desired: Point
    actual: Point
    error: Point
    multi_dof_joint_names: sequence[str]
    multi_dof_desired: MultiPoint
    multi_dof_actual: MultiPoint
    multi_dof_error: MultiPoint


@dataclass
class ArmFeedbackMessage(IdlStruct, typename="control_msgs.action.dds_.FollowJointTrajectory_FeedbackMessage_"):
    goal_id: Uuid
    feedback: ArmFeedback


# --- std_srvs ------------------------------------------------------------------------------------------


@dataclass
class TriggerRequest(IdlStruct, typename="std_srvs.srv.dds_.Trigger_Request_"):
    client: uint64
    number: int64
    structure_needs_at_least_one_member: uint8


@dataclass
class TriggerResponse(IdlStruct, typename="std_srvs.srv.dds_.Trigger_Response_"):
    client: uint64
    number: int64
    success: bool
    message: str


@dataclass
class SetBoolRequest(IdlStruct, typename="std_srvs.srv.dds_.SetBool_Request_"):
    client: uint64
    number: int64
    data: bool


@dataclass
class SetBoolResponse(IdlStruct, typename="std_srvs.srv.dds_.SetBool_Response_"):
    client: uint64
    number: int64
    success: bool
    message: str
