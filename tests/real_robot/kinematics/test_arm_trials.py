"""An arm with a model and a sensor at its wrist, on ROS 1 and on ROS 2, told to do harm.

One deployment of each graph goes through all trials, in their order.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path

import pytest
from arm_trial import AWAY, HOME, STOPPING, TIMEOUT, Arm
from deployment import RATE, on_both_graphs, report
from processes import json_lines, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4


def make_arm(folder: Path, graph: str) -> Arm:
    wrench = {"topic": "/wrench", "max_force": 20, "max_torque": 5}
    model = {"boxes": [WALL], "joint_states": "/joint_states", "max_effort": {"elbow": 5}}
    return Arm(folder, graph, wrench, model)


arm = on_both_graphs(make_arm)


@pytest.mark.parametrize(
    ("fault", "is_found", "limit"),
    [("effort 9", "effort of elbow is 9", "at most 5"), ("push 30", "force is 30 N", "at most 20")],
    ids=["effort", "force"],
)
def test_an_effort_or_a_force_beyond_its_limit(arm: Arm, fault: str, is_found: str, limit: str) -> None:
    arm.travel(AWAY)
    told = arm.tell(fault)
    until(lambda: arm.deploy.says(f"{is_found}, {limit} is allowed"), "the hold")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < STOPPING
    until(lambda: arm.deploy.says(f"stopped: {is_found}"), "the stop")
    arm.end_fault()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("mute", "/joint_states: silent for"), ("numb", f"/wrench has not shown force and torque for {TIMEOUT}")],
    ids=["joints", "wrench alone"],
)
def test_what_is_published_no_more(arm: Arm, fault: str, reason: str) -> None:
    arm.travel(HOME)
    told = arm.tell(fault)
    until(lambda: arm.deploy.says(reason), "the hold")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < TIMEOUT + STOPPING
    until(lambda: arm.mode() == "stopped", "the stop")
    arm.end_fault()


def test_a_policy_that_asks_into_a_wall(arm: Arm) -> None:
    """It rests at the first refusal; then it may come nearer, step by step, to where it is always refused."""
    arm.reach("1.2 0")
    asked = time.monotonic()
    until(lambda: arm.graph.check_alive() or arm.deploy.says("wall, at least"), "the refusal")
    until(lambda: arm.nearest() < 0.06, "nearness")
    arm.await_stand()
    refused = next(x["time"] for x in json_lines(arm.ticks) if x["time"] > asked and "model" in x["limited"])
    rest = next(a for a, b in pairwise([*arm.motions(), math.inf]) if b - max(a, refused) > 1.5 / RATE)
    report(rest - refused)
    assert arm.nearest() >= 0.01 and rest - refused < STOPPING
