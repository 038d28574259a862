"""Small nodes around a robot, on the graph that ROBOT_GRAPH names: python graph_node.py ROLE [ARGUMENT ...]

pedal: held down, and says so on /pedal (Bool) 20 times a second.
button TOPIC LISTENERS: "ready" once so many listen; each line of standard input presses it or lets it go ("pressed
    SECONDS", "released SECONDS", monotonic).
say TOPIC: publishes each line of standard input as a String, once somebody listens.
joystick TOPIC: publishes twists there.
record FILE: writes every twist and gripper command that is sent, a JSON line each: {"time": monotonic seconds at
    receipt, "twist": [...]} or {"time": ..., "gripper": ...}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from real_robot.bridge.sim_node import SimNode, open_node


def this_node(name: str) -> SimNode:
    return open_node(os.environ["ROBOT_GRAPH"], name)  # type: ignore[arg-type]


def twist_of(message: Any) -> list[float]:
    return [getattr(part, axis) for part in (message.twist.linear, message.twist.angular) for axis in "xyz"]


def pedal(node: SimNode) -> None:
    publisher = node.publisher("/pedal", "std_msgs/Bool")
    while True:
        publisher.publish(node.message("std_msgs/Bool", data=True))
        time.sleep(0.05)


def button(node: SimNode, topic: str, listeners: str) -> None:
    publisher = node.publisher(topic, "std_msgs/Bool", latched=True)
    while node.num_listeners(publisher) < int(listeners):
        time.sleep(0.01)
    print("ready", flush=True)
    for pressed in itertools.cycle((True, False)):
        sys.stdin.readline()
        print("pressed" if pressed else "released", time.monotonic(), flush=True)
        publisher.publish(node.message("std_msgs/Bool", data=pressed))


def say(node: SimNode, topic: str) -> None:
    publisher = node.publisher(topic, "std_msgs/String")
    for line in sys.stdin:
        while not node.num_listeners(publisher):
            time.sleep(0.02)
        publisher.publish(node.message("std_msgs/String", data=line.strip()))


def joystick(node: SimNode, topic: str) -> None:
    publisher = node.publisher(topic, "geometry_msgs/TwistStamped")
    print("up", flush=True)
    while True:
        publisher.publish(node.message("geometry_msgs/TwistStamped", time.time_ns()))
        time.sleep(0.5)


def record(node: SimNode, path: str) -> None:
    file = open(path, "a", buffering=1)  # noqa: SIM115 (as long as the process)

    def write(**values: Any) -> None:
        file.write(json.dumps({"time": time.monotonic(), **values}) + "\n")

    node.subscribe("/twist_command", "geometry_msgs/TwistStamped", lambda m: write(twist=twist_of(m)), 1000)
    node.subscribe("/gripper/command", "sensor_msgs/JointState", lambda m: write(gripper=m.position[0]), 1000)
    print("ready", flush=True)
    time.sleep(10_000)


if __name__ == "__main__":
    {f.__name__: f for f in (pedal, button, say, joystick, record)}[sys.argv[1]](this_node(sys.argv[1]), *sys.argv[2:])  # type: ignore[operator]
