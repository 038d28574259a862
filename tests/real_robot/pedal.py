"""A ROS 1 node: a pedal that is held down, and says so on /pedal (Bool) 20 times a second."""

# pyright: reportMissingImports=false

from __future__ import annotations

import time

from real_robot.transports.ros.install import enable


def main() -> None:
    enable()
    import rospy
    from std_msgs.msg import Bool

    rospy.init_node("pedal")
    publisher = rospy.Publisher("/pedal", Bool, queue_size=1, tcp_nodelay=True)
    while not rospy.is_shutdown():
        publisher.publish(True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
