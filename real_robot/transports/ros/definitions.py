"""Message definitions that neither rosbags, Debian's packages nor PyPI's have: control_msgs, std_srvs, actions' parts.

Fields and constants alone, as the packages publish them (control_msgs: BSD-3-Clause, as of Humble and Jazzy).
Each constant below is one `.msg` text; an action is three.
"""

from __future__ import annotations

import functools
from typing import Any

GRIPPER_STATE = "float64 position\nfloat64 effort\nbool stalled\nbool reached_goal\n"
GRIPPER_COMMAND = ("control_msgs/GripperCommand command\n", GRIPPER_STATE, GRIPPER_STATE)
TRAJECTORY_RESULT = (
    "int32 error_code\nint32 SUCCESSFUL = 0\nint32 INVALID_GOAL = -1\nint32 INVALID_JOINTS = -2\n"
    "int32 OLD_HEADER_TIMESTAMP = -3\nint32 PATH_TOLERANCE_VIOLATED = -4\nint32 GOAL_TOLERANCE_VIOLATED = -5\n"
    "string error_string\n"
)
TRAJECTORY_FEEDBACK = "std_msgs/Header header\nstring[] joint_names\n" + "".join(
    f"trajectory_msgs/JointTrajectoryPoint {part}\n" for part in ("desired", "actual", "error")
)
MULTI_DOF_FEEDBACK = "string[] multi_dof_joint_names\n" + "".join(
    f"trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_{part}\n" for part in ("desired", "actual", "error")
)

COMMON = {
    "control_msgs/GripperCommand": "float64 position\nfloat64 max_effort\n",
    "control_msgs/JointTolerance": "string name\nfloat64 position\nfloat64 velocity\nfloat64 acceleration\n",
    "control_msgs/JointJog": "std_msgs/Header header\nstring[] joint_names\nfloat64[] displacements\n"
    "float64[] velocities\nfloat64 duration\n",
    "interbotix_xs_msgs/JointGroupCommand": "string name\nfloat32[] cmd\n",
    "interbotix_xs_msgs/JointSingleCommand": "string name\nfloat32 cmd\n",
}
ROS1_ACTIONS = {
    "control_msgs/GripperCommand": GRIPPER_COMMAND,
    "control_msgs/FollowJointTrajectory": (
        "trajectory_msgs/JointTrajectory trajectory\ncontrol_msgs/JointTolerance[] path_tolerance\n"
        "control_msgs/JointTolerance[] goal_tolerance\nduration goal_time_tolerance\n",
        TRAJECTORY_RESULT,
        TRAJECTORY_FEEDBACK,
    ),
}
ROS2_MESSAGES = {
    "control_msgs/JointComponentTolerance": "uint16 X_AXIS=1\nuint16 Y_AXIS=2\nuint16 Z_AXIS=3\nuint16 TRANSLATION=4\n"
    "uint16 ROTATION=5\nstring joint_name\nuint16 component\nfloat64 position\nfloat64 velocity\n"
    "float64 acceleration\n",
    "action_msgs/srv/CancelGoal_Request": "action_msgs/GoalInfo goal_info\n",
    "action_msgs/srv/CancelGoal_Response": "int8 return_code\naction_msgs/GoalInfo[] goals_canceling\n",
    "std_srvs/srv/Trigger_Request": "uint8 structure_needs_at_least_one_member\n",  # ROS 2 has no empty structures
    "std_srvs/srv/Trigger_Response": "bool success\nstring message\n",
    "std_srvs/srv/SetBool_Request": "bool data\n",
    "std_srvs/srv/SetBool_Response": "bool success\nstring message\n",
}
ROS2_ACTIONS = {
    "control_msgs/GripperCommand": GRIPPER_COMMAND,
    "control_msgs/ParallelGripperCommand": (
        "sensor_msgs/JointState command\n",
        "sensor_msgs/JointState state\nbool stalled\nbool reached_goal\n",
        "sensor_msgs/JointState state\n",
    ),
    "control_msgs/FollowJointTrajectory": (
        "trajectory_msgs/JointTrajectory trajectory\n"
        "trajectory_msgs/MultiDOFJointTrajectory multi_dof_trajectory\n"
        "control_msgs/JointTolerance[] path_tolerance\n"
        "control_msgs/JointComponentTolerance[] component_path_tolerance\n"
        "control_msgs/JointTolerance[] goal_tolerance\n"
        "control_msgs/JointComponentTolerance[] component_goal_tolerance\n"
        "builtin_interfaces/Duration goal_time_tolerance\n",
        TRAJECTORY_RESULT,
        TRAJECTORY_FEEDBACK + MULTI_DOF_FEEDBACK,
    ),
}


def ros2_texts(distro: str) -> dict[str, str]:
    """ROS 2 type name ("control_msgs/action/GripperCommand_SendGoal_Request") -> definition."""
    texts = {**COMMON, **ROS2_MESSAGES}
    for name, (goal, result, feedback) in ROS2_ACTIONS.items():
        full = name.replace("/", "/action/")
        texts |= {
            f"{full}_Goal": goal,
            f"{full}_Result": result,
            f"{full}_Feedback": feedback,
            f"{full}_SendGoal_Request": f"unique_identifier_msgs/UUID goal_id\n{full}_Goal goal\n",
            f"{full}_SendGoal_Response": "bool accepted\nbuiltin_interfaces/Time stamp\n",
            f"{full}_GetResult_Request": "unique_identifier_msgs/UUID goal_id\n",
            f"{full}_GetResult_Response": f"int8 status\n{full}_Result result\n",
            f"{full}_FeedbackMessage": f"unique_identifier_msgs/UUID goal_id\n{full}_Feedback feedback\n",
        }
    if distro == "kilted":  # control_msgs 6.3 on
        indexed = f"{TRAJECTORY_FEEDBACK}int32 index\n{MULTI_DOF_FEEDBACK}int32 multi_dof_index\n"
        texts["control_msgs/action/FollowJointTrajectory_Feedback"] = indexed
    return texts


def ros2_packages() -> dict[str, dict[str, str]]:
    """Package -> file in it ("action/GripperCommand.action") -> text, of the packages that PyPI's wheels lack."""
    files = {f"{name.replace('/', '/msg/')}.msg": text for name, text in {**COMMON, **ROS2_MESSAGES}.items()}
    files = {name: text for name, text in files.items() if name.count("/") == 2}
    files |= {f"{name.replace('/', '/action/')}.action": "---\n".join(parts) for name, parts in ROS2_ACTIONS.items()}
    packages: dict[str, dict[str, str]] = {}
    for name, text in files.items():
        package, _, file = name.partition("/")
        packages.setdefault(package, {})[file] = text
    return packages


def ros1_texts() -> dict[str, str]:
    """ROS 1 type name ("control_msgs/GripperCommandActionGoal") -> definition."""
    texts = dict(COMMON)
    for name, parts in ROS1_ACTIONS.items():
        for part, text in zip(("Goal", "Result", "Feedback"), parts, strict=True):
            kept = ("goal_id", "GoalID") if part == "Goal" else ("status", "GoalStatus")
            texts[name + part] = text
            texts[f"{name}Action{part}"] = (
                f"std_msgs/Header header\nactionlib_msgs/{kept[1]} {kept[0]}\n{name}{part} {part.lower()}\n"
            )
        texts[f"{name}Action"] = "".join(
            f"{name}Action{part} action_{part.lower()}\n" for part in ("Goal", "Result", "Feedback")
        )
    return texts


@functools.cache
def ros1_classes() -> dict[str, Any]:
    """rospy's classes of `ros1_texts`, for a ROS 1 without control_msgs, as genpy makes them of a definition."""
    from actionlib_msgs.msg import GoalID, GoalStatus
    from genpy.dynamic import generate_dynamic
    from trajectory_msgs.msg import JointTrajectory

    separator = "\n" + "=" * 80 + "\n"
    parts: dict[str, str] = {}
    for known in (GoalID, GoalStatus, JointTrajectory):
        own, *others = known._full_text.split(separator)
        parts[known._type] = own
        for other in others:
            title, _, text = other.partition("\n")
            parts[title.removeprefix("MSG: ")] = text
    parts |= ros1_texts()
    core = "control_msgs/GripperCommandAction"
    rest = [f"MSG: {name}\n{text}" for name, text in parts.items() if name != core]
    return generate_dynamic(core, separator.join([parts[core], *rest]))
