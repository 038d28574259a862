"""The documented try-out without a robot (docs/deploy.md, docs/console.md), as a newcomer does it.

Real processes, a real ROS 1 graph, the shipped policy. The robot must move when a person presses Start, and say what it
does.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_socket import Browser
from processes import Child, RosGraph, json_lines, missing_ros, until

from real_robot.transports.ros.master import free_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
SCENES = 4
PATIENT = [  # a busy machine, at half of the speed
    *("rate=10", "silence=60", "pace_timeout=0.2", "execution.max_blind=2", "observation.max_age=2"),
    *("safety.observation_timeout=2", "safety.command_timeout=2", "episode.timeout=60"),
    "safety.workspace.meters_per_unit=0.5",
]
CALL = """
import sys
from real_robot.transports.ros.install import enable
enable()
import rospy
from std_srvs.srv import Trigger
rospy.wait_for_service(sys.argv[1], 60)
answer = rospy.ServiceProxy(sys.argv[1], Trigger)()
print(answer.success, answer.message)
"""


class TryOut:
    """The three terminals."""

    def __init__(self, folder: Path) -> None:
        self.graph, self.port, self.server = RosGraph(folder), free_port(), free_port()
        self.trace, self.ticks = folder / "trace.jsonl", folder / "ticks.jsonl"

    def start(self, *options: str, policy: tuple[str, ...] = (), sim: tuple[str, ...] = ()) -> None:
        """`vla-rl robot sim`, `serve` (or a light server that behaves so), and `deploy`."""
        self.sim = self.start_sim(*sim)
        if policy:
            self.graph.start("server", "tests/real_robot/light_server.py", str(self.server), *policy)
        else:
            self.graph.cli("server", "serve", "pretrained:tabletop_base", "--port", str(self.server))
        self.deploy = self.graph.cli(
            *("deploy", "deploy", "sim_robot", f"transport.master={self.graph.master.uri}", *PATIENT),
            *("--server", f"127.0.0.1:{self.server}", "--wait", "400", "--log", str(self.ticks), *options),
        )

    def start_sim(self, *options: str) -> Child:
        own = ["speed=0.5", f"trace={self.trace}", "--master", self.graph.master.uri]
        return self.graph.cli("sim", "robot", "sim", *options, *own)

    def browser(self) -> Browser:
        until(lambda: self.deploy.says("console: http://"), "the console", 500)
        browser = Browser(self)
        assert browser.take_control()["in_control"]
        return browser

    def call(self, service: str) -> str:
        """What a caller on the graph is told."""
        child = self.graph.start("caller", "-c", CALL, service)
        assert child.process.wait(120) == 0, child.output()
        return child.output().splitlines()[-1]

    def followed(self) -> int:
        """Control steps in which the arm followed a motion."""
        return sum(bool(line["twist"] and np.any(line["twist"])) for line in json_lines(self.trace))


@pytest.fixture
def try_out(tmp_path: Path) -> Iterator[TryOut]:
    made = TryOut(tmp_path)
    yield made
    made.graph.close()


def position(status: dict[str, Any]) -> np.ndarray:
    return np.array(status["state"][:3])


def test_start_in_the_console_begins_an_episode_in_which_the_policy_moves_the_robot(try_out: TryOut) -> None:
    try_out.start("--console", str(try_out.port), sim=("patience=20",))
    until(lambda: try_out.sim.says("scene laid out: push_to_zone, train 0. Waiting for a start"), "the scene")
    browser = try_out.browser()
    outcomes = []
    for scene in range(SCENES):
        before = position(browser.until(lambda s: s.get("state") and s["phase"] in ("idle", "ended")))
        browser.press("start")
        browser.until(lambda s, since=before: s["phase"] == "autonomous" and np.abs(position(s) - since).max() > 0.01)
        ended = browser.until(lambda s: s["phase"] == "ended")
        outcomes.append(ended["outcome"])
        assert f"episode {scene + 1} runs: push_to_zone, train {scene}, at most" in try_out.sim.output()
        how = {"success": "solved", "failure": "out of time"}[ended["outcome"]]
        until(lambda scene=scene, how=how: try_out.sim.says(f"episode {scene + 1}: {how} after"), "the word")
        assert ended["why"].startswith(f"{ended['outcome']} (/episode/outcome)")
    assert "success" in outcomes, "the shipped policy solves about every second scene"


def test_a_person_says_which_episode_was_better_and_the_dataset_has_it(try_out: TryOut, tmp_path: Path) -> None:
    """Failures both: nothing else tells them apart."""
    try_out.start("--console", str(try_out.port), "--record", str(tmp_path / "set"), policy=("normal",))
    browser = try_out.browser()
    for _ in range(2):
        assert "better" not in browser.until(lambda s: "start" in s["can"])["can"]
        browser.press("start")
        browser.until(lambda s: s["phase"] == "autonomous" and s["mode"] == "running" and s["step"])
        browser.press("failure")
        browser.until(lambda s: s["phase"] == "ended" and s["outcome"] == "failure")
    browser.until(lambda s: {"better", "worse"} <= set(s["can"]))
    browser.press("better")
    browser.until(lambda s: any(text == "better than the episode before (anna)" for _, text in s["notices"]))
    try_out.deploy.process.send_signal(signal.SIGINT)
    assert try_out.deploy.process.wait(120) == 0, try_out.deploy.output()
    assert try_out.deploy.output().splitlines()[-1] == f"next, what was recorded: vla-rl report {tmp_path / 'set'}"
    assert json_lines(tmp_path / "set/preferences.jsonl") == [{"better": 1, "worse": 0, "by": "anna"}]


def test_a_person_drives_a_scene_lays_out_the_next_and_so_does_the_graph(try_out: TryOut) -> None:
    try_out.start("--console", str(try_out.port), policy=("normal",))
    browser = try_out.browser()
    browser.until(lambda s: "new_scene" in s["can"])
    browser.press("new_scene")
    until(lambda: try_out.deploy.says("new scene (anna): push_to_zone, train 1"), "the next scene")
    assert try_out.sim.says("scene laid out: push_to_zone, train 1. Waiting for a start")
    browser.press("demonstrate")
    home = position(browser.until(lambda s: s["phase"] == "demo" and s["mode"] != "stopped"))
    until(lambda: try_out.sim.says("episode 1 runs: push_to_zone, train 1"), "the scene that waited")

    def left(status: dict[str, Any]) -> bool:
        browser.drive(y=0.5)
        return position(status)[1] > home[1] + 0.02

    browser.until(left)
    browser.press("new_scene")
    refused = browser.until(lambda s: s["refused"])["refused"]
    assert refused == ["new scene: not possible while demo; end the episode first"]
    browser.press("failure")
    browser.until(lambda s: s["phase"] == "ended")

    assert try_out.call("/scene/reset") == "True push_to_zone, train 2"
    assert try_out.sim.says("episode 1: left after"), "of its 6000 steps"
    assert try_out.call("/episode/begin").startswith("True push_to_zone, train 2: push the")
    assert try_out.sim.says("episode 2 runs: push_to_zone, train 2")
    browser.press("start")
    browser.until(lambda s: s["phase"] == "autonomous" and s["mode"] == "running")
    assert try_out.sim.says("episode 3 runs: push_to_zone, train 3"), "one scene is used once"


def test_without_a_console_enter_begins_and_n_lays_out(try_out: TryOut) -> None:
    try_out.start(policy=("normal",))
    until(lambda: try_out.deploy.says("n lays the scene out anew"), "the keys", 500)
    try_out.deploy.type("n")
    until(lambda: try_out.deploy.says("new scene (keyboard): push_to_zone, train 1"), "the next scene")
    assert not try_out.followed()
    try_out.deploy.type("\n")
    until(lambda: try_out.followed() > 10, "motion")
    assert try_out.sim.says("episode 1 runs: push_to_zone, train 1")
    try_out.deploy.signal(signal.SIGINT)
    assert try_out.deploy.process.wait(120) == 0, try_out.deploy.output()[-3000:]


def test_a_service_that_is_not_there_leaves_the_robot_to_the_person(try_out: TryOut) -> None:
    options = ("--console", str(try_out.port), "episode.begin=/arm/go_home", "episode.timeout=3")
    try_out.start(*options, policy=("normal",))
    browser = try_out.browser()
    browser.press("start")
    paused = browser.until(lambda s: s["phase"] == "paused")
    assert paused["why"] == "alarm (scene): service /arm/go_home is not there for 3 s"
    assert not try_out.followed()
    browser.press("resume")
    until(try_out.followed, "the person has laid it out by hand: the policy goes on")


def test_an_unknown_task_is_an_error_that_names_those_there_are(try_out: TryOut) -> None:
    sim = try_out.start_sim("task=fold_towel")
    assert sim.process.wait(120) != 0
    assert "sim.task: got 'fold_towel', allowed: push_to_zone, pick_place" in sim.output()
