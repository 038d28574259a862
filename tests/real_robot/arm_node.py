"""An arm of two joints that is where /command puts it, and tells its /joint_states and /wrench at 50 Hz.

python arm_node.py TRACE, where each set-point is written as it comes: {"time": ..., "joints": [...]}. What /fault
(String) says: "effort 9" is the elbow's effort from then on; "push 30" presses on its wrist with 30 N; "numb" publishes
no wrench more; "mute" publishes nothing more; "none" ends all of these.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from graph_node import this_node

JOINTS = ["shoulder", "elbow"]


def main() -> None:
    joints, effort, force, fault = [0.0, 0.0], [0.0], [0.0], ["none"]
    trace = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115 (as long as the process)
    node = this_node("arm")

    def follow(message: Any) -> None:
        names = list(message.joint_names)
        joints[:] = [message.points[0].positions[names.index(name)] for name in JOINTS]
        trace.write(json.dumps({"time": time.monotonic(), "joints": joints}) + "\n")

    def obey(message: Any) -> None:
        word, *number = message.data.split()
        fault[0] = word
        size = float(number[0]) if number else 0.0
        effort[0], force[0] = (0.0, size) if word == "push" else (size, 0.0)
        trace.write(json.dumps({"time": time.monotonic(), "fault": message.data}) + "\n")

    node.subscribe("/command", "trajectory_msgs/JointTrajectory", follow)
    node.subscribe("/fault", "std_msgs/String", obey)
    publisher = node.publisher("/joint_states", "sensor_msgs/JointState")
    sensor = node.publisher("/wrench", "geometry_msgs/WrenchStamped")
    print("ready", flush=True)
    while True:
        now = time.time_ns()
        if fault[0] != "mute":
            states = {"name": JOINTS, "position": list(joints), "effort": [0.0, effort[0]]}
            publisher.publish(node.message("sensor_msgs/JointState", now, **states))
        if fault[0] not in ("mute", "numb"):
            wrench = node.message("geometry_msgs/WrenchStamped", now)
            wrench.wrench.force.x = force[0]
            sensor.publish(wrench)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
