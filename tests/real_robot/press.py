"""A stop button on the graph: `python press.py TOPIC` presses it once, and says when (monotonic seconds)."""

# pyright: reportMissingImports=false

import sys
import time

from real_robot.transports.ros.install import enable

enable()
import rospy  # noqa: E402
from std_msgs.msg import Bool  # noqa: E402

rospy.init_node("button", anonymous=True, disable_signals=True)
publisher = rospy.Publisher(sys.argv[1], Bool, queue_size=1, latch=True)
while not publisher.get_num_connections():
    time.sleep(0.01)
time.sleep(0.5)  # for all who listen
print(f"pressed {time.monotonic()}", flush=True)
publisher.publish(True)
time.sleep(600)
