"""A ROS 1 node between the camera and the bridge, which does to its pictures what /fault (String) says.

none: passes them on. stale: stamps of ten seconds ago. shuffled: each picture is followed by an older one.
corrupt: cut off in the middle. black: covered. frozen: the same picture again and again, newly stamped.
ahead, behind: the clock that stamps them has jumped by an hour; skewed: by 0.9 s.

At the first picture of each it prints "FAULT TAKEN PUBLISHED", monotonic seconds: when the picture was taken, and now.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import time

import numpy as np

from real_robot.bridge.codec import encode_image
from real_robot.transports.ros.install import enable

SHIFT = {"stale": -10, "ahead": 3600, "behind": -3600, "skewed": 0.9}


def main() -> None:
    enable()
    import rospy
    from sensor_msgs.msg import CompressedImage
    from std_msgs.msg import String

    fault, told = ["none"], ["none"]
    earlier: list[CompressedImage] = []
    frozen: dict[str, bytes] = {}
    covered = encode_image(np.zeros((64, 64, 3), np.uint8), "jpeg")
    rospy.init_node("faulty_camera")
    publisher = rospy.Publisher("/faulty/image/compressed", CompressedImage, queue_size=10, tcp_nodelay=True)

    def forward(message: CompressedImage) -> None:
        if fault[0] != told[0]:
            told[0] = fault[0]
            taken = message.header.stamp.to_sec() - time.time() + time.monotonic()
            print(told[0], taken, time.monotonic(), flush=True)
        message = copy.deepcopy(message)
        earlier.append(copy.deepcopy(message))
        del earlier[:-4]
        message.header.stamp += rospy.Duration.from_sec(SHIFT.get(fault[0], 0))
        if fault[0] == "corrupt":
            message.data = message.data[: len(message.data) // 2]
        if fault[0] == "black":
            message.data = covered
        if fault[0] == "frozen":
            message.data = frozen.setdefault("data", message.data)
        else:
            frozen.clear()
        publisher.publish(message)
        if fault[0] == "shuffled":
            publisher.publish(earlier[0])

    rospy.Subscriber("/fault", String, lambda message: fault.__setitem__(0, message.data))
    rospy.Subscriber("/agentview/image/compressed", CompressedImage, forward, queue_size=1, tcp_nodelay=True)
    print("ready", flush=True)
    rospy.spin()


if __name__ == "__main__":
    main()
