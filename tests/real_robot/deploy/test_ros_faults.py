"""Faults on ROS 1 beside the trials of `test_trials.py`: a deployment each, of master, server, robot and deploy.

In each the robot must stand within the time that its contract says, never be told more than its limits, go on
by itself only after a short fault, else after a person's reset, and the log up to then must be whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import MAX_AGE, SILENCE, SLACK, Deployment
from processes import json_lines, missing_ros, until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


@pytest.fixture
def robot(folder: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    options = getattr(request, "param", {})
    deployment = Deployment(folder, **options)
    try:
        if options.get("behavior", "normal") != "slow":
            deployment.await_motion()
        yield deployment
        deployment.check_records()
    finally:
        deployment.close()


def test_a_robot_that_dies_and_comes_back_waits_for_a_person(robot: Deployment) -> None:
    robot.sim.kill()
    died = time.monotonic()
    robot.check_stands(died + MAX_AGE + 0.5, SILENCE)
    until(lambda: robot.mode() == "stopped", "the stop", SILENCE + 5)
    robot.sim = robot.start_sim()
    back = time.monotonic()
    until(lambda: any(line["time"] > back for line in json_lines(robot.trace)), "the robot's return")
    robot.check_stands(back, 2.0)
    robot.reset()


@pytest.mark.parametrize("robot", [{"behavior": "slow"}], indirect=True)
def test_a_policy_that_gives_nothing_ends_in_a_stop(robot: Deployment) -> None:
    until(lambda: robot.mode() == "stopped", "the stop")
    robot.check_stands(time.monotonic() + 0.2, 2.0)
    robot.deploy.type("r")
    until(lambda: robot.mode() == "holding", "the reset", 10)
    until(lambda: robot.mode() == "stopped", "the next stop", SILENCE + 10)


@pytest.mark.parametrize("robot", [{"behavior": "wild"}], indirect=True)
def test_actions_out_of_range_are_limited(robot: Deployment) -> None:
    time.sleep(3)
    lines = [line for line in json_lines(robot.ticks) if line["requested"] and line["sent"]]
    assert max(abs(x) for line in lines for x in line["requested"]) > 1e4
    assert all(line["limited"] for line in lines if np.abs(line["requested"]).max() > 1)


def test_without_the_master_the_robot_stops_until_a_reset(robot: Deployment) -> None:
    robot.graph.master.process.kill()
    robot.graph.master.process.wait()
    lost = time.monotonic()
    until(lambda: robot.mode() == "stopped", "the stop", 10)
    robot.check_stands(lost + 0.5 + 1.0 + SLACK, 1.0)  # the master is asked each 0.5 s, and has 1 s to answer
    robot.deploy.type("r")
    robot.check_stands(time.monotonic() + 0.2, 2.0)
    assert robot.mode() == "stopped", "no reset without a master"
    robot.graph.restart_master()
    robot.sim.kill()  # as on a robot, whose nodes do not outlive the master
    robot.sim = robot.start_sim()
    robot.check_stands(time.monotonic(), 3.0)
    until(lambda: "registering all topics again" in robot.deploy.output(), "the return of the master")
    back = time.monotonic()
    until(lambda: any(line["time"] > back for line in json_lines(robot.trace)), "the robot's return")
    time.sleep(1)
    robot.reset()


@pytest.mark.parametrize("robot", [{"camera_between": True}], indirect=True)
def test_pictures_out_of_order_are_left_out(robot: Deployment) -> None:
    robot.graph.node("say", "/fault").type("shuffled\n")
    camera = robot.camera
    until(lambda: camera and camera.says("shuffled"), "the first of them")
    robot.await_motion()
    time.sleep(2)
    stamps = [line["stamp"] for line in json_lines(robot.ticks) if line["stamp"]]
    assert stamps == sorted(stamps), "the policy never sees an older picture"
    robot.deploy.type("q")
    assert robot.deploy.process.wait(30) == 0
    assert '"out of order"' in robot.deploy.output()


def test_nothing_is_left_running(folder: Path) -> None:
    deployment = Deployment(folder)
    groups = [child.process.pid for child in deployment.graph.children]
    deployment.close()
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
