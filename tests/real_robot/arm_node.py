"""A ROS 1 node: an arm of two joints that is where /command puts it, and tells its /joint_states and /wrench at 50 Hz.

python arm_node.py TRACE, where each set-point is written as it comes: {"time": ..., "joints": [...]}. What /fault
(String) says: "effort 9" is the elbow's effort from then on; "push 30" presses on its wrist with 30 N; "numb" publishes
no wrench more; "mute" publishes nothing more.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time

from real_robot.transports.ros.install import enable

JOINTS = ["shoulder", "elbow"]


def main() -> None:
    enable()
    import rospy
    from geometry_msgs.msg import WrenchStamped
    from sensor_msgs.msg import JointState
    from std_msgs.msg import String
    from trajectory_msgs.msg import JointTrajectory

    joints, effort, force, fault = [0.0, 0.0], [0.0], [0.0], ["none"]
    trace = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115 (as long as the process)
    rospy.init_node("arm")

    def follow(message: JointTrajectory) -> None:
        joints[:] = [message.points[0].positions[message.joint_names.index(name)] for name in JOINTS]
        trace.write(json.dumps({"time": time.monotonic(), "joints": joints}) + "\n")

    def obey(message: String) -> None:
        word, *number = message.data.split()
        fault[0] = word
        size = float(number[0]) if number else 0.0
        effort[0], force[0] = (0.0, size) if word == "push" else (size, 0.0)
        trace.write(json.dumps({"time": time.monotonic(), "fault": message.data}) + "\n")

    rospy.Subscriber("/command", JointTrajectory, follow, queue_size=1, tcp_nodelay=True)
    rospy.Subscriber("/fault", String, obey, queue_size=1)
    publisher = rospy.Publisher("/joint_states", JointState, queue_size=1, tcp_nodelay=True)
    sensor = rospy.Publisher("/wrench", WrenchStamped, queue_size=1, tcp_nodelay=True)
    print("ready", flush=True)
    while not rospy.is_shutdown():
        if fault[0] != "mute":
            message = JointState(name=JOINTS, position=list(joints), velocity=[], effort=[0.0, effort[0]])
            message.header.stamp = rospy.Time.now()
            publisher.publish(message)
        if fault[0] not in ("mute", "numb"):
            wrench = WrenchStamped()
            wrench.header.stamp, wrench.wrench.force.x = rospy.Time.now(), force[0]
            sensor.publish(wrench)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
