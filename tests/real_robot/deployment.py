"""The processes of a robot at work on a real graph, ROS 1's or ROS 2's, for tests of faults, and what was sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from processes import BOTH_GRAPHS, Child, json_lines, open_graph, until

from real_robot.transports.ros.master import free_port

RATE = 10.0  # half of the tabletop's 20 Hz, so that a busy machine keeps up
SILENCE = 3.0
MAX_AGE = 0.5
SLACK = 1.0  # of the machine's scheduling
ON_ITS_WAY = 0.5  # seconds that a busy machine may have a robot late in following what was sent
START = 300.0  # seconds that processes which live may take to start; each test's own time limit is near
LIMITS = np.array([1, 1, 1, 10, 10, 10])
CONTRACT = [
    f"rate={RATE}",
    f"silence={SILENCE}",
    "pace_timeout=0.1",
    f"observation.max_age={MAX_AGE}",
    f"safety.observation_timeout={MAX_AGE}",
    f"safety.command_timeout={MAX_AGE}",
    "safety.checks.motion_tolerance=0",  # at half its speed the simulator goes half as far as it is told
]


class Deployment:
    """The four processes, and what they wrote."""

    def __init__(
        self,
        folder: Path,
        behavior: str = "normal",
        camera_between: bool = False,
        overrides: Sequence[str] = (),
        contract: str = "sim_robot",
        sim: Sequence[str] = (),
        options: Sequence[str] = ("--start",),
        graph: str = "ros1",
    ) -> None:
        self.graph = open_graph(graph, folder)
        self.contract, self.sim_options, self.options = contract, sim, options
        self.port = free_port()
        self.trace, self.ticks = folder / "trace.jsonl", folder / "ticks.jsonl"
        self.behavior = behavior
        self.camera = self.graph.start("camera", "tests/real_robot/faulty_camera.py") if camera_between else None
        self.sim = self.start_sim()
        self.server = self.start_server()
        self.overrides = list(overrides)
        self.overrides += ["observation.images.agentview.topic=/faulty/image/compressed"] if camera_between else []
        self.deploy = self.graph.cli("deploy", *self.command())

    def command(self, *options: str) -> list[str]:
        """The arguments of `vla-rl` that start deploy; `options`: in place of its own."""
        return [
            *("deploy", self.contract, self.graph.transport, *CONTRACT, *self.overrides),
            *("--server", f"127.0.0.1:{self.port}", "--log", str(self.ticks), *(options or self.options)),
        ]

    def start_sim(self) -> Child:
        scene = ["env.horizons.push_to_zone=1000000", "env.success.hold_steps=1000000", f"speed={RATE / 20}"]
        own = [f"trace={self.trace}", *self.graph.sim]
        return self.graph.cli("sim", "robot", "sim", *scene, *self.sim_options, *own)

    def start_server(self) -> Child:
        return self.graph.start("server", "tests/real_robot/light_server.py", str(self.port), self.behavior)

    def moves(self, since: float) -> bool:
        """The robot has followed a twist that is not zero since then."""
        return any(line["twist"] and np.any(line["twist"]) for line in json_lines(self.trace) if line["time"] > since)

    def await_ticks(self) -> None:
        """Wait until deploy controls the robot: however long the processes take to start, as long as all live."""
        until(lambda: self.graph.check_alive() or self.mode() != "none", "deploy's first tick", START)

    def await_motion(self) -> None:
        self.await_ticks()
        now = time.monotonic()
        until(lambda: self.graph.check_alive() or self.moves(now), "motion")

    def mode(self) -> str:
        lines = json_lines(self.ticks)
        return lines[-1]["mode"] if lines else "none"

    def check_stands(self, since: float, seconds: float) -> None:
        """Nothing that moves was sent from `since` on, for so long; nor followed, but for what was on its way then."""
        time.sleep(max(0.0, since + seconds - time.monotonic()))
        for line in json_lines(self.ticks):
            if line["time"] > since and line["sent"]:
                assert not np.any(line["sent"][:6]), f"sent {line['sent']} {line['time'] - since:.2f} s too late"
        assert not self.moves(since + ON_ITS_WAY), "the robot still moves"

    def quiet(self, seconds: float) -> bool:
        """Nothing was sent for so long."""
        sent = [line["time"] for line in json_lines(self.ticks) if line["sent"]]
        return bool(sent) and time.monotonic() - sent[-1] > seconds

    def last_motion(self) -> float:
        """When the robot moved last, monotonic seconds; fails where it does not stand by now."""
        lines = [line for line in json_lines(self.trace) if line["twist"]]
        assert not np.any(lines[-1]["twist"]), f"the robot was left with {lines[-1]['twist']}"
        return max(line["time"] for line in lines if np.any(line["twist"]))

    def reset(self, done: Callable[[], bool] | None = None) -> None:
        """As a person does it: again, while a button's release is under way, or a server comes up. Ends with motion."""
        since, typed = time.monotonic(), 0.0

        def is_done() -> bool:
            nonlocal typed
            self.graph.check_alive()
            if self.mode() == "stopped" and time.monotonic() - typed > SLACK:
                self.deploy.type("r")
                typed = time.monotonic()
            return done() if done else self.moves(since)

        until(is_done, "motion after a reset")

    def check_records(self) -> None:
        """Limits were kept throughout, and every line that was written is whole."""
        sent = [line["sent"] for line in json_lines(self.ticks) if line["sent"]]
        assert sent and np.abs(np.array(sent)).max() <= 1.0
        twists = [line["twist"] for line in json_lines(self.trace) if line["twist"]]
        assert twists and (np.abs(np.array(twists)) <= LIMITS + 1e-9).all()
        stamps = [line["time"] for line in json_lines(self.ticks)]
        assert stamps == sorted(stamps)

    def close(self) -> None:
        self.graph.close()


def on_both_graphs[Made: Deployment](make: Callable[[Path, str], Made]) -> Callable[..., Iterator[Made]]:
    """Return a module's fixture: one deployment of a folder and a graph for all tests on ROS 1, one for ROS 2's."""

    @pytest.fixture(scope="module", params=BOTH_GRAPHS)
    def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
        with closing(make(tmp_path_factory.mktemp(request.param), request.param)) as deployment:
            yield deployment

    return opened


def report(seconds: float) -> None:
    """Say when the robot was moved last, counted from the fault (pytest's -s shows it)."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].split()[0]
    print(f"\n{test}: last motion after {1000 * max(0.0, seconds):.0f} ms")
