"""Faults with real processes on a real ROS 1 graph: master, policy server, simulated robot, `vla-rl deploy`.

In each the robot must stand within the time that its contract says, never be told more than its limits, go on
by itself only after a short fault, else after a person's reset, and the log up to then must be whole.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import MAX_AGE, RATE, SILENCE, SLACK, Deployment
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
        if options.get("behavior", "normal") in ("normal", "wild"):
            deployment.await_motion()
        yield deployment
        deployment.check_records()
    finally:
        deployment.close()


def test_a_short_silence_is_held_and_a_long_one_stops(robot: Deployment) -> None:
    """The robot's process is frozen (SIGSTOP): its connections stay open, and nothing raises."""
    robot.sim.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    after = frozen + MAX_AGE + 1.0
    lines = until(lambda: [line for line in json_lines(robot.ticks) if line["time"] > after], "ticks after it")
    assert lines[0]["mode"] == "holding"
    check_motion_ends_with(robot, frozen)
    robot.sim.signal(signal.SIGCONT)
    robot.await_motion()  # by itself

    robot.sim.signal(signal.SIGSTOP)
    until(lambda: robot.mode() == "stopped", "the stop", SILENCE + 5)
    robot.sim.signal(signal.SIGCONT)
    robot.check_stands(time.monotonic() + 0.3, 2.0)
    assert robot.mode() == "stopped"
    robot.reset()


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


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_without_the_policy_server_the_robot_holds_then_stops(robot: Deployment, how: str) -> None:
    robot.server.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    gone = time.monotonic()
    chunk = 8 / RATE  # what it had been told already is played to its end
    robot.check_stands(gone + chunk + MAX_AGE + SLACK, 1.0)
    assert robot.mode() in ("holding", "stopped")
    until(lambda: robot.mode() == "stopped", "the stop", chunk + SILENCE + 10)
    if how == "killed":
        robot.server = robot.start_server()
    else:
        robot.server.signal(signal.SIGCONT)
    robot.check_stands(time.monotonic(), 2.0)
    robot.reset()


@pytest.mark.parametrize("robot", [{"behavior": "slow"}, {"behavior": "nan"}], indirect=True, ids=["slow", "nan"])
def test_a_policy_that_gives_nothing_usable_ends_in_a_stop(robot: Deployment) -> None:
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


def tell_camera(robot: Deployment, fault: str) -> tuple[float, float]:
    """Switch the fault, from a node of its own, and wait for its first picture.

    Returns when that was taken, and when it was published (monotonic seconds, by the camera's own process).
    """
    code = (
        "import sys, time; from real_robot.transports.ros.install import enable; enable(); import rospy\n"
        "from std_msgs.msg import String; rospy.init_node('tell')\n"
        "p = rospy.Publisher('/fault', String, queue_size=1)\n"
        "while not p.get_num_connections(): time.sleep(0.02)\n"
        "time.sleep(0.1); p.publish(sys.argv[1]); time.sleep(0.2)"
    )
    assert robot.camera is not None, "a deployment with a camera between"
    before = len(robot.camera.output())
    subprocess.run([sys.executable, "-c", code, fault], env=robot.graph.env, timeout=60, check=True)
    pattern = rf"^{fault} (\S+) (\S+)$"
    camera = robot.camera
    found = until(lambda: re.search(pattern, camera.output()[before:], re.MULTILINE), "the first faulty picture")
    return float(found[1]), float(found[2])


def check_motion_ends_with(robot: Deployment, last_stamp: float) -> None:
    """Judge by stamps alone, so that a busy machine changes nothing: the robot was never moved by an observation that
    is older than it may be, nor by one made after `last_stamp` (monotonic seconds). Prints when it was moved last.
    """
    stamp, moved = float("-inf"), []
    for line in json_lines(robot.ticks):
        stamp = line["stamp"] or stamp
        if line["sent"] and np.any(line["sent"][:6]):
            moved.append(line["time"])
            assert line["time"] - stamp <= MAX_AGE, "moved by an observation that is too old"
            assert stamp <= last_stamp, f"moved by an observation of {stamp - last_stamp:.3f} s after the last good one"
    print(f"last motion {(max(moved) - last_stamp) * 1000:.0f} ms after")


def check_stops_in_time(robot: Deployment) -> None:
    """Every tick later than `silence` after the last new observation was a stop, whenever it came."""
    seen, stamp = float("inf"), float("-inf")
    for line in json_lines(robot.ticks):
        if line["stamp"] and line["stamp"] > stamp:
            seen, stamp = line["time"], line["stamp"]
        assert line["time"] - seen <= SILENCE or line["mode"] == "stopped"


@pytest.mark.parametrize("robot", [{"camera_between": True}], indirect=True)
@pytest.mark.parametrize(
    ("fault", "reason", "told"),
    [
        ("stale", "stale", r"stamped -10\.\d\d s from this machine's clock"),
        ("corrupt", "undecodable", "JPEG cut off"),
        ("ahead", "future", r"stamped \+3\d{3}\.\d\d s"),
        ("behind", "stale", r"stamped -3\d{3}\.\d\d s"),
        ("skewed", "future", r"stamped \+0\.[1-9]\d s from this machine's clock, at most \+0\.1 s is allowed"),
    ],
)
def test_pictures_that_cannot_be_used_stop_the_robot(robot: Deployment, fault: str, reason: str, told: str) -> None:
    _, published = tell_camera(robot, fault)
    until(lambda: robot.mode() == "stopped", "the stop")
    check_motion_ends_with(robot, published)
    check_stops_in_time(robot)
    for what in ("holding: observations are stale", "stopped: no (observation|action) for 3 s"):
        assert re.search(f"safety: {what}: agentview: its messages are refused: .*{told}", robot.deploy.output()), what
    tell_camera(robot, "none")
    robot.check_stands(time.monotonic(), 1.0)
    assert robot.mode() == "stopped"
    robot.reset()
    robot.deploy.type("q")
    assert robot.deploy.process.wait(30) == 0
    assert f'"{reason}"' in robot.deploy.output()


@pytest.mark.parametrize("robot", [{"camera_between": True}], indirect=True)
@pytest.mark.parametrize(
    ("fault", "reason", "seconds"),
    # The frozen camera needs a second, and as much again for the 2 cm of motion that tell it from a robot that stands.
    [("black", "camera agentview is black", 0.0), ("frozen", "camera agentview has shown the same picture", 2.0)],
)
def test_pictures_that_show_nothing_new_stop_the_robot(
    robot: Deployment, fault: str, reason: str, seconds: float
) -> None:
    """They are fresh and whole: only their pixels tell."""
    taken, _ = tell_camera(robot, fault)
    until(lambda: robot.mode() == "stopped", "the stop")
    check_motion_ends_with(robot, taken + seconds)
    assert reason in robot.deploy.output()
    tell_camera(robot, "none")
    robot.check_stands(time.monotonic(), 1.0)
    robot.reset()


@pytest.mark.parametrize("robot", [{"camera_between": True}], indirect=True)
def test_pictures_out_of_order_are_left_out(robot: Deployment) -> None:
    tell_camera(robot, "shuffled")
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
