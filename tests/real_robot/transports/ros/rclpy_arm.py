"""A robot of ROS 2 with rclpy's own action servers and services, in a process of its own: rclpy_arm.py LOG.

It serves at a line of standard input; at each later one its joints are at zero.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import rclpy
from action_joints import JOINTS, PERIOD, Joints, outcome
from action_msgs.srv import CancelGoal
from control_msgs.action import FollowJointTrajectory, GripperCommand
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import MultiThreadedExecutor
from sensor_msgs.msg import JointState
from std_srvs.srv import SetBool, Trigger

LATE = 3.0  # seconds that the ignored goal's answer takes: the client has given it up by then


class Server:
    """One goal at a time; a newer one preempts it."""

    def __init__(self, node: Any, joints: Joints, server: str, kind: Any, name: str) -> None:
        self.joints, self.server, self.kind = joints, server, kind
        self._current: Any = None
        group = ReentrantCallbackGroup()
        self._canceler = node.create_client(CancelGoal, f"{name}/_action/cancel_goal", callback_group=group)
        self._server = ActionServer(
            node, kind, name, self._execute, callback_group=group, goal_callback=self._on_goal,
            handle_accepted_callback=self._on_accepted, cancel_callback=self._on_cancel,
        )  # fmt: skip

    def targets(self, goal: Any) -> dict[str, float]:
        """Where the goal wants the joints; the log is told."""
        if isinstance(goal, GripperCommand.Goal):
            self.joints.tell(
                "goal", server=self.server, position=goal.command.position, max_effort=goal.command.max_effort
            )
            return {"finger": goal.command.position}
        point = goal.trajectory.points[0]
        targets = dict(zip(goal.trajectory.joint_names, point.positions, strict=True))
        seconds = point.time_from_start.sec + point.time_from_start.nanosec / 1e9
        self.joints.tell("goal", server=self.server, targets=targets, seconds=seconds)
        return targets

    def _on_goal(self, goal: Any) -> GoalResponse:
        what = outcome(self.targets(goal).get("finger", 0.0))
        if what == "ignore":
            time.sleep(LATE)
        return GoalResponse.REJECT if what in ("reject", "ignore") else GoalResponse.ACCEPT

    def _on_accepted(self, handle: Any) -> None:
        before, self._current = self._current, handle
        if before is not None and before.is_active:
            before.abort()
        handle.execute()

    def _on_cancel(self, handle: Any) -> CancelResponse:
        self.joints.tell("cancel", server=self.server)
        return CancelResponse.ACCEPT

    def _execute(self, handle: Any) -> Any:
        goal, result = handle.request, self.kind.Result()
        if isinstance(goal, GripperCommand.Goal):
            targets = {"finger": goal.command.position}
        else:
            targets = dict(zip(goal.trajectory.joint_names, goal.trajectory.points[0].positions, strict=True))
        what = outcome(targets.get("finger", 0.0))
        if what in ("abort", "stall"):
            result.stalled = what == "stall"
            handle.abort()
            return result
        if what == "cancel":  # another client's wish
            request = CancelGoal.Request()
            request.goal_info.goal_id = handle.goal_id
            self._canceler.call_async(request)
        while handle.is_active and not handle.is_cancel_requested:
            if what == "move" and self.joints.step(targets):
                handle.succeed()
                return result
            if what == "cancel":
                time.sleep(PERIOD)
            elif self.kind is GripperCommand:
                handle.publish_feedback(GripperCommand.Feedback(position=self.joints.positions["finger"]))
        if handle.is_active:
            handle.canceled()
        return result


def main() -> None:
    joints = Joints(Path(sys.argv[1]))
    rclpy.init()
    node = rclpy.create_node("arm")
    publisher = node.create_publisher(JointState, "/joint_states", 1)

    def publish() -> None:
        while True:
            message = JointState(name=list(JOINTS), position=[joints.positions[j] for j in JOINTS])
            message.header.stamp = node.get_clock().now().to_msg()
            publisher.publish(message)
            time.sleep(PERIOD)

    threading.Thread(target=publish, daemon=True).start()
    print("up", flush=True)
    sys.stdin.readline()

    def answer(name: str, success: bool, message: str) -> Any:
        def handle(request: Any, response: Any) -> Any:
            joints.tell("service", name=name, **({"data": request.data} if hasattr(request, "data") else {}))
            response.success, response.message = success, message
            return response

        return handle

    servers = (
        Server(node, joints, "gripper", GripperCommand, "/gripper_cmd"),
        Server(node, joints, "arm", FollowJointTrajectory, "/arm_controller/follow_joint_trajectory"),
        node.create_service(Trigger, "/start", answer("start", True, "")),
        node.create_service(SetBool, "/suction", answer("suction", True, "as you like")),
        node.create_service(Trigger, "/refuse", answer("refuse", False, "not today")),
    )
    executor = MultiThreadedExecutor(num_threads=8)
    executor.add_node(node)
    threading.Thread(target=executor.spin, daemon=True).start()
    print("serving", flush=True)
    joints.obey(sys.stdin)
    del servers


if __name__ == "__main__":
    main()
