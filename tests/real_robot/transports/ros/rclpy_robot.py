"""The tabletop as a node of a ROS 2 graph, on plain rclpy: python rclpy_robot.py TRACE. What `vla-rl robot sim` is on
ROS 1, without its services and episodes: it takes twists and gripper commands, and publishes 10 times a second."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import rclpy
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CompressedImage, JointState
from std_msgs.msg import String

from real_robot.bridge.codec import encode_image, to_quaternion
from sim.tabletop.env import TabletopConfig
from vla_rl.types import EpisodeSpec

RATE, STEPS, TIMEOUT = 10.0, 2, 0.3  # two control steps of the tabletop a tick: real time


def main() -> None:
    rclpy.init()
    node, newest = QoSProfile(depth=1), dict[str, tuple[float, Any]]()
    robot = rclpy.create_node("sim_robot")
    pose = robot.create_publisher(PoseStamped, "/end_effector_pose", node)
    joints = robot.create_publisher(JointState, "/joint_states", node)
    image = robot.create_publisher(CompressedImage, "/agentview/image/compressed", node)
    for topic, kind in (("/twist_command", TwistStamped), ("/gripper/command", JointState)):
        robot.create_subscription(kind, topic, lambda m, t=topic: newest.update({t: (time.monotonic(), m)}), node)
    env, due = TabletopConfig().make(), time.monotonic()
    seen = env.reset(EpisodeSpec("push_to_zone", "train", 0))
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    robot.create_publisher(String, "/episode/instruction", latched).publish(String(data=seen.instruction))
    with open(sys.argv[1], "a", buffering=1) as trace:
        while True:
            due = max(due + 1 / RATE, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                rclpy.spin_once(robot, timeout_sec=left)
            heard, message = newest.get("/twist_command", (0.0, None))
            twist = np.zeros(6)
            if message is not None and time.monotonic() - heard < TIMEOUT:
                parts = message.twist.linear, message.twist.angular
                twist = np.array([getattr(part, axis) for part in parts for axis in "xyz"])
            trace.write(json.dumps({"time": time.monotonic(), "twist": twist.tolist() if message else None}) + "\n")
            for _ in range(STEPS):
                env.apply(np.array([*twist[:3], *(twist[3:] / 10), 0.0], np.float32))
            publish(env.observe(), robot.get_clock().now().to_msg(), pose, joints, image)


def publish(seen: Any, stamp: Any, pose: Any, joints: Any, image: Any) -> None:
    where, fingers, picture = PoseStamped(), JointState(), CompressedImage()
    where.header.frame_id = "table"
    where.header.stamp = fingers.header.stamp = picture.header.stamp = stamp
    where.pose.position.x, where.pose.position.y, where.pose.position.z = map(float, seen.state[:3])
    turn = to_quaternion(seen.state[3:6].astype(np.float64))
    for axis, value in zip("xyzw", turn, strict=True):
        setattr(where.pose.orientation, axis, float(value))
    fingers.name, fingers.position = ["finger_left", "finger_right"], [float(v) for v in seen.state[6:8]]
    picture.format, picture.data = "jpeg", encode_image(seen.images["agentview"], "jpeg")
    pose.publish(where)
    joints.publish(fingers)
    image.publish(picture)


if __name__ == "__main__":
    main()
