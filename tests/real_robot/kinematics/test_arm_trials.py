"""An arm with a model and a sensor at its wrist, on ROS 1 and on ROS 2, told to do harm.

One deployment of each graph goes through all trials, in their order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from arm_trial import STOPPING, TIMEOUT, Arm
from deployment import RATE, report
from processes import BOTH_GRAPHS, json_lines, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4
AWAY, HOME = "-1.8 -1.5", "0 0"  # two seconds apart, in the open


@pytest.fixture(scope="module", params=BOTH_GRAPHS)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arm]:
    wrench = {"topic": "/wrench", "max_force": 20, "max_torque": 5}
    model = {"boxes": [WALL], "joint_states": "/joint_states", "max_effort": {"elbow": 5}}
    arm = Arm(tmp_path_factory.mktemp(request.param), request.param, wrench, model)
    try:
        yield arm
    finally:
        arm.close()


def test_an_effort_beyond_its_limit(arm: Arm) -> None:
    arm.reach(AWAY)
    told = arm.tell("effort 9")
    until(lambda: arm.deploy.says("effort of elbow is 9, at most 5 is allowed"), "the hold")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < STOPPING
    until(lambda: arm.deploy.says("stopped: effort of elbow is 9"), "the stop")
    arm.end_fault()


def test_joints_that_are_published_no_more(arm: Arm) -> None:
    arm.reach(HOME)
    told = arm.tell("mute")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < TIMEOUT + STOPPING
    assert arm.mode() in ("holding", "stopped")
    arm.end_fault()


def test_a_force_beyond_its_limit(arm: Arm) -> None:
    arm.reach(AWAY)
    told = arm.tell("push 30")
    until(lambda: arm.deploy.says("force is 30 N, at most 20 is allowed"), "the hold")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < STOPPING
    until(lambda: arm.deploy.says("stopped: force is 30 N"), "the stop")
    arm.end_fault()


def test_a_wrench_that_is_published_no_more(arm: Arm) -> None:
    """The joints are published as before."""
    arm.reach(HOME)
    told = arm.tell("numb")
    until(lambda: arm.deploy.says(f"/wrench has not shown force and torque for {TIMEOUT}"), "the hold")
    arm.await_stand()
    report(arm.last_motion() - told)
    assert arm.last_motion() - told < TIMEOUT + STOPPING
    arm.end_fault()


def test_a_policy_that_asks_into_a_wall(arm: Arm) -> None:
    """It rests at the first refusal; then it may come nearer, step by step, to where it is always refused."""
    arm.reach("1.2 0")
    asked = time.monotonic()
    until(lambda: arm.graph.check_alive() or arm.deploy.says("wall, at least"), "the refusal")
    until(lambda: arm.nearest() < 0.06, "nearness")
    arm.await_stand()
    refused = next(x["time"] for x in json_lines(arm.ticks) if x["time"] > asked and "model" in x["limited"])
    rest = next(a for a, b in pairwise([*arm.motions(), math.inf]) if a > refused - 1 / RATE and b - a > 1.5 / RATE)
    report(rest - refused)
    assert arm.nearest() >= 0.01 and rest - refused < STOPPING
