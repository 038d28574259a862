"""An arm of two joints on a real ROS 1 graph, with a policy that drives it, and faults that are told to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import RosGraph, json_lines, missing_ros, until
from urdfs import PLANAR, joint_contract

from real_robot.contract.load import load_contract
from real_robot.kinematics.arm_model import ArmModel
from real_robot.transports.ros.master import free_port

JOINTS = ["shoulder", "elbow"]
RATE, TIMEOUT = 10, 0.4
STOPPING = 0.6  # braking takes 125 ms and a tick of 100 ms; the rest is a busy machine's


def on_ros(test: Callable[..., None]) -> Callable[..., None]:
    missing = missing_ros()
    skip = pytest.mark.skipif(bool(missing), reason=missing or "ROS 1 is there")
    return pytest.mark.live(pytest.mark.slow(pytest.mark.timeout(400)(skip(test))))


class Arm:
    """Master, arm, policy server and deploy, each a process; what the arm followed is in `trace`."""

    def __init__(self, folder: Path, goal: str, wrench: dict[str, Any] | None = None, **model: Any) -> None:
        self.graph, self.folder = RosGraph(folder), folder
        self.trace, self.ticks = folder / "trace.jsonl", folder / "ticks.jsonl"
        state = {
            "topic": "/joint_states",
            "type": "sensor_msgs/JointState",
            "joints": JOINTS,
            "align": {"tolerance": 0.5},
        }
        observation = {"max_age": TIMEOUT, "state": [state]}
        path = joint_contract(
            folder,
            PLANAR,
            JOINTS,
            rate=RATE,
            transport={"kind": "ros1", "master": self.graph.master.uri},
            observation=observation,
            safety={"observation_timeout": TIMEOUT, "command_timeout": TIMEOUT, "wrench": wrench},
            model=model,
        )
        section = load_contract(path).model
        assert section is not None, "it has one"
        self.model = ArmModel(section, Path(section.file))
        node = self.graph.start("arm", "tests/real_robot/arm_node.py", str(self.trace))
        port = free_port()
        self.graph.start("server", "tests/real_robot/light_server.py", str(port), f"reach {goal}")
        until(lambda: node.says("ready"), "the arm")
        options = ["--server", f"127.0.0.1:{port}", "--instruction", "go", "--log", str(self.ticks)]
        self.deploy = self.graph.cli("deploy", "deploy", str(path), *options)
        until(lambda: self.deploy.says("arm: waiting for"), "deploy")
        self.deploy.type("\n")

    def followed(self) -> list[dict[str, Any]]:
        return [line for line in json_lines(self.trace) if "joints" in line]

    def last_motion(self) -> float:
        """When the arm was last told to be elsewhere than before."""
        lines = self.followed()
        moved = [b["time"] for a, b in pairwise(lines) if a["joints"] != b["joints"]]
        return max(moved)

    def await_stand(self) -> None:
        """Wait until the arm has not moved for half a second."""
        until(lambda: self.graph.check_alive() or time.monotonic() - self.last_motion() > 0.5, "standing")

    def tell(self, fault: str) -> float:
        """Say it on /fault. Returns when the arm heard it."""
        code = f"""from real_robot.transports.ros.install import enable
enable()
import rospy, time
from std_msgs.msg import String
rospy.init_node("fault")
publisher = rospy.Publisher("/fault", String, queue_size=1, latch=True)
publisher.publish({fault!r})
time.sleep(5)
"""
        child = self.graph.start("fault", "-c", code)
        lines = until(lambda: [x for x in json_lines(self.trace) if x.get("fault") == fault], "the fault")
        child.kill()
        return lines[0]["time"]

    def close(self) -> None:
        self.graph.close()

    def nearest(self) -> float:
        """Smallest distance of the lower link to the wall, of all set-points that the arm followed."""
        joints = [np.array(line["joints"]) for line in self.followed()]
        return min(self.model.distances(j).get(("lower", "wall"), math.inf) for j in joints)


@contextmanager
def running(folder: Path, goal: str, wrench: dict[str, Any] | None = None, **model: Any) -> Iterator[Arm]:
    arm = Arm(folder, goal, wrench, **model)
    try:
        yield arm
    finally:
        arm.close()
