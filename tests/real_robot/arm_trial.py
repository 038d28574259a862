"""An arm of two joints on a real graph, a policy that drives it where it is told, and faults that it is told."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from deployment import RATE, Deployment
from processes import Child, json_lines, until
from urdfs import PLANAR, joint_contract

from real_robot.contract.load import load_contract
from real_robot.kinematics.arm_model import ArmModel

JOINTS = ["shoulder", "elbow"]
TIMEOUT = 0.4
AWAY, HOME = (-1.8, -1.5), (0, 0)  # two seconds apart, in the open
STOPPING = 0.6  # braking takes 125 ms and a tick of 100 ms; the rest is a busy machine's


class Arm(Deployment):
    """Arm, policy server and deploy, each a process; what the arm followed is in `trace`."""

    def __init__(self, folder: Path, graph: str, wrench: dict[str, Any], model: dict[str, Any]) -> None:
        state = {"topic": "/joint_states", "type": "sensor_msgs/JointState", "joints": JOINTS}
        path = joint_contract(
            folder,
            PLANAR,
            JOINTS,
            rate=RATE,
            observation={"state": [{**state, "align": {"tolerance": 0.5}}]},
            safety={"wrench": wrench},
            model=model,
        )
        section = load_contract(path).model
        assert section is not None, "it has one"
        self.model = ArmModel(section, Path(section.file))
        prompt = [f"{name}={TIMEOUT}" for name in ("observation.max_age", "safety.observation_timeout")]
        options = ("--start", "--instruction", "go")
        super().__init__(folder, contract=str(path), overrides=prompt, options=options, graph=graph)
        self.teller = self.graph.node("say", "/fault")

    def start_sim(self) -> Child:
        return self.graph.start("arm", "tests/real_robot/arm_node.py", str(self.trace))

    def start_server(self) -> Child:
        return self.graph.start("server", "tests/real_robot/light_server.py", str(self.port), "reach 0 0")

    def followed(self) -> list[dict[str, Any]]:
        return [line for line in json_lines(self.trace) if "joints" in line]

    def motions(self) -> list[float]:
        """When the arm was told to be elsewhere than before."""
        return [b["time"] for a, b in pairwise(self.followed()) if a["joints"] != b["joints"]]

    def last_motion(self) -> float:
        return max(self.motions())

    def moves(self, since: float) -> bool:
        return any(moment > since for moment in self.motions())

    def reach(self, goal: str) -> None:
        """The policy asks for these joints from now on. Returns when the arm is on its way."""
        self.await_ticks()
        if self.mode() == "stopped":  # a trial before this one failed, and left its fault behind
            self.end_fault()
        now = time.monotonic()
        self.server.type(f"{goal}\n")
        self.reset(lambda: sum(m > now for m in self.motions()) > 3)

    def travel(self, place: tuple[float, float]) -> None:
        """Reach for a place, or for the other one where the arm is at it already."""
        self.await_ticks()
        joints = self.followed()[-1]["joints"] if self.followed() else HOME
        there = math.dist(place, joints) < 0.3
        self.reach("{} {}".format(*((HOME if place == AWAY else AWAY) if there else place)))

    def await_stand(self) -> None:
        """Wait until the arm has not moved for half a second."""
        until(lambda: self.graph.check_alive() or time.monotonic() - self.last_motion() > 0.5, "standing")

    def tell(self, fault: str) -> float:
        """Say it on /fault. Returns when the arm heard it; `deploy.says` looks at what follows."""
        self.deploy.listen()
        told = lambda: [line["time"] for line in json_lines(self.trace) if line.get("fault") == fault]  # noqa: E731
        before = len(told())
        self.teller.type(f"{fault}\n")
        return until(lambda: told()[before:], "the fault")[0]

    def end_fault(self) -> None:
        self.tell("none")
        self.reset(lambda: self.mode() == "running")

    def nearest(self) -> float:
        """Smallest distance of the lower link to the wall, of all set-points that the arm followed."""
        joints = [np.array(line["joints"]) for line in self.followed()]
        return min(self.model.distances(j).get(("lower", "wall"), math.inf) for j in joints)
