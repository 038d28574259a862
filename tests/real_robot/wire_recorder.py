"""A ROS 1 node that writes every twist and gripper command that is sent: python wire_recorder.py FILE.

A JSON line each, {"time": monotonic seconds at receipt, "twist": [...]} or {"time": ..., "gripper": ...}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from typing import Any

from real_robot.transports.ros.install import enable


def main() -> None:
    enable()
    import rospy
    from geometry_msgs.msg import TwistStamped
    from sensor_msgs.msg import JointState

    file = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115 (as long as the process)

    def write(**values: Any) -> None:
        file.write(json.dumps({"time": time.monotonic(), **values}) + "\n")

    def on_twist(message: TwistStamped) -> None:
        linear, angular = message.twist.linear, message.twist.angular
        write(twist=[linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])

    rospy.init_node("wire_recorder")
    rospy.Subscriber("/twist_command", TwistStamped, on_twist, queue_size=1000, tcp_nodelay=True)
    rospy.Subscriber(
        *("/gripper/command", JointState, lambda message: write(gripper=message.position[0])),
        queue_size=1000,
        tcp_nodelay=True,
    )
    print("ready", flush=True)
    rospy.spin()


if __name__ == "__main__":
    main()
