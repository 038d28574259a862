"""A robot of ROS 1 with real actionlib servers, in a process of its own: ros1_robot.py LOG.

It serves at a line of standard input; at each later one its joints are at zero. The gripper's server is actionlib's
ActionServer, which may reject; the arm's is its SimpleActionServer, as in most controllers.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import actionlib
import rospy
from action_joints import JOINTS, PERIOD, Joints, outcome
from sensor_msgs.msg import JointState
from std_srvs.srv import SetBool, SetBoolResponse, Trigger, TriggerResponse

from real_robot.transports.ros.definitions import ros1_classes

TYPES = ros1_classes()
GripperResult = TYPES["control_msgs/GripperCommandResult"]
GripperFeedback = TYPES["control_msgs/GripperCommandFeedback"]


class Gripper:
    """One goal at a time; a newer one preempts it."""

    def __init__(self, joints: Joints) -> None:
        self._joints = joints
        self._current: Any = None
        self._canceled: set[str] = set()
        kind = TYPES["control_msgs/GripperCommandAction"]
        self._server = actionlib.ActionServer("/gripper_cmd", kind, self._on_goal, self._on_cancel, auto_start=False)
        self._server.start()

    def _on_goal(self, handle: Any) -> None:
        command = handle.get_goal().command
        self._joints.tell("goal", server="gripper", position=command.position, max_effort=command.max_effort)
        what = outcome(command.position)
        if what == "reject":
            handle.set_rejected(GripperResult(), "no such gap")
        elif what != "ignore":
            handle.set_accepted()
            self._current = handle
            threading.Thread(target=self._execute, args=(handle, command.position, what), daemon=True).start()

    def _on_cancel(self, handle: Any) -> None:
        self._joints.tell("cancel", server="gripper")
        self._canceled.add(handle.get_goal_id().id)

    def _execute(self, handle: Any, target: float, what: str) -> None:
        if what == "abort":
            handle.set_aborted(GripperResult(), "the motor is hot")
        elif what == "stall":
            handle.set_aborted(GripperResult(stalled=True), "stalled")
        elif what == "cancel":
            handle.set_canceled(GripperResult(), "another's wish")
        while what == "move":
            if handle is not self._current or handle.get_goal_id().id in self._canceled:
                handle.set_canceled(GripperResult(position=self._joints.positions["finger"]), "preempted")
                return
            if self._joints.step({"finger": target}):
                handle.set_succeeded(GripperResult(position=target, reached_goal=True))
                return
            handle.publish_feedback(GripperFeedback(position=self._joints.positions["finger"]))


class Arm:
    """A joint trajectory controller's action."""

    def __init__(self, joints: Joints) -> None:
        self._joints = joints
        kind = TYPES["control_msgs/FollowJointTrajectoryAction"]
        name = "/arm_controller/follow_joint_trajectory"
        self._server = actionlib.SimpleActionServer(name, kind, self._execute, auto_start=False)
        self._server.start()

    def _execute(self, goal: Any) -> None:
        point = goal.trajectory.points[0]
        targets = dict(zip(goal.trajectory.joint_names, point.positions, strict=True))
        self._joints.tell("goal", server="arm", targets=targets, seconds=point.time_from_start.to_sec())
        if any(abs(target) > 3 for target in targets.values()):
            result = TYPES["control_msgs/FollowJointTrajectoryResult"](error_code=-5, error_string="too far")
            self._server.set_aborted(result)
            return
        while not self._joints.step(targets):
            if self._server.is_preempt_requested():
                self._joints.tell("cancel", server="arm")
                self._server.set_preempted()
                return
        self._server.set_succeeded(TYPES["control_msgs/FollowJointTrajectoryResult"]())


def main() -> None:
    joints = Joints(Path(sys.argv[1]))
    rospy.init_node("arm", disable_signals=True)
    publisher = rospy.Publisher("/joint_states", JointState, queue_size=1, tcp_nodelay=True)

    def publish() -> None:
        while not rospy.is_shutdown():
            message = JointState(name=list(JOINTS), position=[joints.positions[j] for j in JOINTS])
            message.header.stamp = rospy.Time.now()
            publisher.publish(message)
            rospy.sleep(PERIOD)

    threading.Thread(target=publish, daemon=True).start()
    print("up", flush=True)
    sys.stdin.readline()

    def start(request: Any) -> Any:
        joints.tell("service", name="start")
        return TriggerResponse(success=True)

    def suction(request: Any) -> Any:
        joints.tell("service", name="suction", data=request.data)
        return SetBoolResponse(success=True, message="as you like")

    servers = Gripper(joints), Arm(joints)
    rospy.Service("/start", Trigger, start)
    rospy.Service("/suction", SetBool, suction)
    rospy.Service("/refuse", Trigger, lambda request: TriggerResponse(success=False, message="not today"))
    print("serving", flush=True)
    joints.obey(sys.stdin)
    del servers
    rospy.signal_shutdown("end")


if __name__ == "__main__":
    main()
