"""The console of `vla-rl deploy` on a real ROS 1 graph: an intervention in a browser, and a browser that is killed.

Master, policy server, simulated robot and deploy are processes of their own.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import Person, browser, missing_browser
from processes import RosGraph, json_lines, missing_ros, until

from real_robot.transports.ros.master import free_port

_MISSING = missing_ros() or missing_browser()
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "all is there"),
]
RATE, SLACK = 10.0, 1.0
TIMEOUT = 0.4  # seconds: teleop.timeout
CONTRACT = [
    f"rate={RATE}",
    "silence=60",
    "pace_timeout=0.1",
    "observation.max_age=2",
    "safety.observation_timeout=2",
    "safety.command_timeout=2",
    f"teleop.timeout={TIMEOUT}",
]


class Deployment:
    """The processes, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.graph = RosGraph(folder)
        self.ticks, self.trace = folder / "ticks.jsonl", folder / "trace.jsonl"
        server, self.port = free_port(), free_port()
        scene = ["env.horizons.push_to_zone=1000000", "env.success.hold_steps=1000000", f"speed={RATE / 20}"]
        master = self.graph.master.uri
        self.graph.cli("sim", "robot", "sim", *scene, f"trace={self.trace}", "--master", master)
        self.graph.start("server", "tests/real_robot/light_server.py", str(server), "normal")
        self.record = folder / "dataset"
        self.deploy = self.graph.cli(
            *("deploy", "deploy", "sim_robot", f"transport.master={master}", *CONTRACT),
            *("--server", f"127.0.0.1:{server}", "--console", str(self.port), "--log", str(self.ticks)),
            *("--record", str(self.record), "--round", "3"),
        )
        until(lambda: self.deploy.says("console: http://"), "the console", 180)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def lines(self, source: str) -> list[dict[str, Any]]:
        """The ticks at which that source's command was followed."""
        return [line for line in json_lines(self.ticks) if line["source"] == source and line["mode"] == "running"]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.graph.close()


def test_a_whole_intervention_against_the_simulated_robot(deployment: Deployment) -> None:
    with browser() as chromium:
        person = Person(chromium, deployment.url)
        person.take_control()
        person.key("Enter", "start")
        until(lambda: len(deployment.lines("policy")) > 10, "the policy drives")
        person.click("take_over")
        person.await_phase("recovery")
        person.page.keyboard.down("a")
        until(lambda: len(deployment.lines("recovery")) > 5, "the person drives")
        person.page.keyboard.up("a")
        person.key("1", "recovery_done")
        person.await_phase("correction")
        person.page.keyboard.down("w")
        until(lambda: len(deployment.lines("correction")) > 5, "the person drives")
        person.page.keyboard.up("w")
        person.click("correction_done")
        person.click("success")
        until(lambda: deployment.deploy.says("episode: success (Anna)"), "the label")
        person.page.keyboard.press("Space")
        person.await_mode("stopped")
        assert not person.errors
    assert max(line["sent"][1] for line in deployment.lines("recovery")) > 0.1, "to the left"
    assert max(line["sent"][0] for line in deployment.lines("correction")) > 0.1, "forward"
    deployment.deploy.signal(signal.SIGINT)
    assert deployment.deploy.process.wait(120) == 0, deployment.deploy.output()[-3000:]
    frames = pd.concat(pd.read_parquet(f) for f in sorted((deployment.record / "data").rglob("*.parquet")))
    sources = [source for source, _ in groupby(frames["control_source"])]
    assert sources == ["policy", "recovery", "correction"]
    assert max(abs(x) for line in json_lines(deployment.ticks) if line["sent"] for x in line["sent"]) <= 1.0


def test_a_browser_that_is_killed_during_take_over(deployment: Deployment) -> None:
    from playwright.sync_api import Error

    with browser() as chromium:
        person = Person(chromium, deployment.url)
        person.take_control()
        person.click("start")
        until(lambda: len(deployment.lines("policy")) > 3, "the policy drives")
        person.click("take_over")
        person.await_phase("recovery")
        person.page.keyboard.down("s")
        until(lambda: len(deployment.lines("recovery")) > 5, "the person drives")
        session = chromium.new_browser_cdp_session()
        gone = time.monotonic()
        with suppress(Error):  # it does not answer any more
            session.send("Browser.crash")
    until(lambda: json_lines(deployment.ticks)[-1]["time"] > gone + 3, "ticks after it")
    late = [line for line in json_lines(deployment.ticks) if line["time"] > gone + TIMEOUT + SLACK]
    assert late and all(line["mode"] == "holding" and line["source"] == "hold" for line in late)
    assert all(np.allclose(line["sent"][:6], 0) for line in late)
    deployment.graph.check_alive()
