"""How deploy ends, with real processes on ROS 1 and on ROS 2: the robot is told to stand before anything else.

The simulated robot is a driver that follows its last twist for ever here: only what deploy sends last makes it stand.
"""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from deployment import RATE, Deployment, report
from processes import Child, json_lines, until

from real_robot.contract.load import shipped_contracts

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(400)]

SPEED = 0.05  # of light_server's circle
BRAKING = 1.0  # seconds that it may take
WITHIN = BRAKING + 2 / RATE + 0.5  # seconds from the signal to the last motion: braking, two ticks, a busy machine


def gentle_contract(folder: Path) -> str:
    """The simulated robot's contract, with a robot that must brake gently."""
    values: dict[str, Any] = yaml.safe_load(shipped_contracts()["sim_robot"].read_text())
    for limits in values["safety"]["dimensions"]:
        if limits["kind"] == "velocity":
            limits |= {"low": -SPEED, "high": SPEED, "max_acceleration": SPEED / BRAKING}
    path = folder / "gentle.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


class Ending(Deployment):
    """A robot that follows its last twist for ever, and a recording of episodes of so many steps."""

    def __init__(self, folder: Path, graph: str, *options: str, horizon: int = 1_000_000) -> None:
        self.record = folder / "dataset"
        record = ("--episodes", "9", "--record", str(self.record))
        sim = ["command_timeout=1000", f"env.horizons.push_to_zone={horizon}"]
        super().__init__(folder, contract=gentle_contract(folder), sim=sim, options=options or record, graph=graph)

    def fast(self) -> bool:
        lines = [line["twist"] for line in json_lines(self.trace)[-3:] if line["twist"]]
        return bool(lines) and float(np.linalg.norm(lines[-1][:2])) > 0.8 * SPEED

    def await_speed(self) -> None:
        self.await_ticks()
        until(lambda: self.graph.check_alive() or self.fast(), "full speed")

    def check_braked(self, asked: float) -> None:
        """It stood in time, and was braked no harder than its contract allows."""
        time.sleep(1.0)
        took = self.last_motion() - asked
        report(took)  # braking takes most of it
        assert took < WITHIN
        sent = np.array([line["sent"][:6] for line in json_lines(self.ticks) if line["sent"]])
        assert np.abs(np.diff(sent, axis=0)).max() <= SPEED / BRAKING / RATE * 1.001
        twists = np.array([line["twist"][:3] for line in json_lines(self.trace) if line["twist"]])
        steps = np.linalg.norm(np.diff(twists, axis=0), axis=1)
        assert steps.max() <= 0.7 * SPEED, "not from full speed to none at once, however late a busy robot hears"


@pytest.fixture(params=["ros1", "rclpy"])
def graph(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=str
)
def test_a_signal_brakes_then_finishes_the_recording(
    folder: Path, graph: str, number: signal.Signals, code: int
) -> None:
    robot = Ending(folder, graph, horizon=60)
    try:
        robot.await_ticks()
        kept = lambda: any(folder.glob(".dataset.recording/shard_*"))  # noqa: E731  # the one under way is not
        until(lambda: robot.graph.check_alive() or kept(), "a whole episode")
        robot.await_speed()
        asked = time.monotonic()
        robot.deploy.signal(number)
        assert robot.deploy.process.wait(90) == code, robot.deploy.output()[-3000:]
        robot.check_braked(asked)
        assert (robot.record / "meta/info.json").is_file(), "the recording is a dataset"
        output = robot.deploy.output()
        assert "finishing the recording" in output and output.index("told to stand") < output.index(
            "finishing the recording"
        )
    finally:
        robot.close()


def test_more_signals_cut_the_recording_short_but_not_the_brake(folder: Path, graph: str) -> None:
    robot = Ending(folder, graph)
    try:
        robot.await_speed()
        asked = time.monotonic()
        robot.deploy.signal(signal.SIGTERM)
        while robot.deploy.process.poll() is None and time.monotonic() < asked + 30:
            time.sleep(0.15)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if robot.deploy.process.poll() is None:
                    robot.deploy.signal(number)
        assert robot.deploy.process.wait(30) == 143, robot.deploy.output()[-3000:]
        robot.check_braked(asked)
    finally:
        robot.close()


def test_a_terminal_that_is_closed(folder: Path, graph: str) -> None:
    """Its signal comes, and whatever deploy then says fails."""
    robot = Ending(folder, graph, "--start")
    robot.deploy.kill()
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
        os.execve(robot.graph.python, [robot.graph.python, "-m", "vla_rl", *robot.command()], robot.graph.env)
    try:
        robot.trace.write_text("")
        robot.ticks.write_text("")
        robot.await_speed()
        asked = time.monotonic()
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 129
        robot.check_braked(asked)
    finally:
        robot.close()


SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from vla_rl.cli.app import main
main()
"""


def test_an_observer_that_fails_ends_in_a_brake_and_says_why(folder: Path, graph: str) -> None:
    """The log of ticks can grow no further: as on a disk that is full, for this one file."""
    robot = Ending(folder, graph, "--start")
    robot.deploy.kill()
    robot.trace.write_text("")
    robot.ticks.write_text("")
    child = robot.graph.start("small", "-c", SMALL_FILES, *robot.command())
    try:
        robot.graph.children.remove(child)
        assert child.process.wait(300) == 2, child.output()[-3000:]
        assert "File too large" in child.output() and "told to stand" in child.output()
        robot.check_braked(json_lines(robot.ticks)[-1]["time"])
    finally:
        child.kill()
        robot.close()


def test_a_person_who_presses_ctrl_c_has_ended_it(folder: Path, graph: str) -> None:
    robot = Ending(folder, graph, "--start")
    try:
        robot.await_speed()
        asked = time.monotonic()
        robot.deploy.signal(signal.SIGINT)
        assert robot.deploy.process.wait(90) == 0, robot.deploy.output()[-3000:]
        robot.check_braked(asked)
    finally:
        robot.close()


def test_before_anything_moves_a_signal_ends_it_at_once(folder: Path) -> None:
    """There is no policy server: deploy waits for one."""
    log = folder / "deploy.log"
    command = [sys.executable, "-m", "vla_rl", "deploy", "sim_robot", "--server", "127.0.0.1:1"]
    child = Child(command, log, {**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        until(lambda: child.says("waiting for the policy server"), "the wait")
        asked = time.monotonic()
        child.signal(signal.SIGTERM)
        assert child.process.wait(20) == 143
        assert time.monotonic() - asked < 10
    finally:
        child.kill()
