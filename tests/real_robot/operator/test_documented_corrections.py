"""docs/correct_and_retrain.md as a lab types it: deploy, console, record, correct, retrain, serve again.

The commands are the page's own, but for ports, folders, the master's address, fewer steps, and an expert's word for the
scripted person, who drives at the console.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from expert_at_console import ExpertAtConsole
from processes import PATIENCE, ROOT, Child, RosGraph, missing_ros, until
from sim_observer import SceneObserver

from real_robot.transports.ros.master import free_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
LONG = 10 * PATIENCE
PAGE = ROOT / "docs/correct_and_retrain.md"
SLOWLY = [  # a busy machine, at half of the speed
    *("rate=10", "silence=60", "pace_timeout=0.2", "execution.max_blind=2", "observation.max_age=2"),
    *("safety.observation_timeout=2", "safety.command_timeout=2", "episode.timeout=60"),
    "safety.checks.motion_tolerance=0",
]
EPISODES = 2


def documented() -> list[list[str]]:
    """The commands of the page's section, in their order."""
    section = PAGE.read_text().partition("### The whole path, without a robot")[2]
    block = re.sub(r"\\\n\s*", " ", section.split("```")[1])
    return [shlex.split(line, comments=True)[1:] for line in block.strip().splitlines()]


class Lab:
    """The terminals."""

    def __init__(self, folder: Path) -> None:
        self.graph, self.port, self.server_port = RosGraph(folder), free_port(), free_port()
        self.folder = folder

    def type(self, name: str, command: list[str], *more: str) -> Child:
        """A line of the page, with the places of this test in place of the page's."""
        uri = self.graph.master.uri
        places = {"8080": str(self.port), "new": uri}
        words = [places.get(word, word) for word in command]
        words = [re.sub(r"\b(datasets|runs)/corrected", rf"{self.folder}/\1/corrected", word) for word in words]
        return self.graph.cli(f"{name}_{len(list(self.folder.glob('*.log')))}", *words, *more)

    def serve(self, command: list[str]) -> Child:
        server = self.type("server", command, "--port", str(self.server_port), "--device", "cpu")
        until(lambda: self.graph.check_alive() or server.says("ready"), "the server", LONG)
        return server

    def deploy(self, command: list[str]) -> Child:
        own = [f"transport.master={self.graph.master.uri}", *SLOWLY, "--wait", str(LONG)]
        child = self.type("deploy", command, *own, "--server", f"127.0.0.1:{self.server_port}")
        until(lambda: self.graph.check_alive() or child.says("console: http://"), "the console", LONG)
        return child

    def end(self, child: Child, number: signal.Signals = signal.SIGINT) -> None:
        child.signal(number)
        code = child.process.wait(LONG)
        self.graph.children.remove(child)
        assert code in (0, 128 + number, -number), child.output()[-3000:]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.graph.close()


def test_the_path_of_a_lab(lab: Lab) -> None:
    sim, serve, deploy, retrain, serve_again = documented()
    lab.type("sim", sim, "publish_expert=true", "speed=0.5")
    server = lab.serve(serve)
    robot = lab.deploy(deploy)
    with closing(SceneObserver(lab.graph.master.uri)) as observer:
        person = ExpertAtConsole(lab, observer)
        driven = [person.run_episode(helps=True)[0] for _ in range(EPISODES)]
        assert any(driven), "there is time to take over"
        person.leave()
    lab.end(robot)
    lab.end(server)
    frames = pd.concat(pd.read_parquet(file) for file in lab.folder.glob("datasets/corrected/data/*/*.parquet"))
    assert {"policy", "recovery"} <= set(frames["control_source"]) and len(set(frames["episode_index"])) == EPISODES

    trainer = lab.type("sft", retrain, "sft.steps=20", "sft.log_every=10")
    assert trainer.process.wait(LONG) == 0, trainer.output()[-3000:]
    lab.graph.children.remove(trainer)
    server = lab.serve(serve_again)
    robot = lab.deploy([word if "datasets/" not in word else "datasets/corrected_2" for word in deploy])
    with closing(SceneObserver(lab.graph.master.uri)) as observer:
        person = ExpertAtConsole(lab, observer)
        person.begin()  # the retrained policy moves the robot
        person.press("failure")
        person.until(lambda s: s["phase"] == "ended")
        person.leave()
    lab.end(robot)
    again = pd.concat(pd.read_parquet(file) for file in lab.folder.glob("datasets/corrected_2/data/*/*.parquet"))
    assert not set(again["policy_version"]) & set(frames["policy_version"]), "another policy acts"
