"""`vla-rl deploy --detector`: with the terminal's keys over topics in memory, and over a real ROS 1 graph."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from console_robot import PATIENT, RATE, PointRobot
from memory_transport import MemoryConfig
from processes import PATIENCE, ROOT, Child, RosGraph, json_lines, missing_ros, until
from typer.testing import CliRunner
from watch_bench import Walker, fitted, served
from websockets.sync.client import connect

from real_robot.deploy.deploy import DeployOptions, deploy
from real_robot.transports.ros.master import free_port
from vla_rl.cli.app import app

POLICY = "pretrained:tabletop_base"


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ot", reason="POT is not installed: pip install '.[robot]'")
    return fitted(tmp_path_factory.mktemp("detector"))


@pytest.mark.live
def test_with_keys_an_alarm_makes_the_robot_hold_and_is_in_the_log(
    detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (
        "transport.kind=memory_transport:MemoryConfig",
        f"transport.graph={tmp_path.name}",
        "episode.begin=''",
        "episode.reset=''",
    )
    transport = MemoryConfig(kind="memory", graph=tmp_path.name).open()
    point, policy, said = PointRobot(transport), Walker(), list[str]()
    reading, writing = os.pipe()
    with os.fdopen(reading) as keys, os.fdopen(writing, "w", buffering=1) as hands, served(policy) as port:
        monkeypatch.setattr("sys.stdin", keys)
        options = DeployOptions(
            robot="sim_robot",
            overrides=(*PATIENT, *own, "execution.refill_at=0"),
            server=f"127.0.0.1:{port}",
            instruction="go forward",
            log=tmp_path / "ticks.jsonl",
            start=True,
            detector=detector,
        )
        threads = [threading.Thread(target=run) for run in (point.run, lambda: deploy(options, said.append))]
        for thread in threads:
            thread.start()
        try:
            until(lambda: point.position[0] > 0.03, "the way forward")
            policy.astray = True
            until(lambda: any(text.startswith("alarm: failure score") for text in said), "the alarm")
            until(lambda: not point.twist.any(), "standstill")
            place = point.position.copy()
            time.sleep(5 / RATE)
            assert (point.position == place).all()
        finally:
            hands.write("q")
            hands.flush()
            threads[1].join(PATIENCE)
            point.ended.set()
            threads[0].join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    scores = [line["failure"] for line in json_lines(tmp_path / "ticks.jsonl")]
    assert scores[0] is None and scores[-1][0] > scores[-1][1] > 0
    assert any("failure detector: float_ot, fitted on walker" in text for text in said)
    assert not any("asked to hold" in text for text in said), "the pauses between chunks do not drown the rest"


def test_a_detector_of_another_checkpoint_is_refused_with_both_hashes(detector: Path) -> None:
    with served(Walker(), policy_hash="7" * 64) as port:
        arguments = ["deploy", "sim_robot", "--server", f"127.0.0.1:{port}", "--detector", str(detector)]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in ("555555555555", "777777777777", "vla-rl failure fit"))


@pytest.mark.parametrize("missing", ["torch", "ot"])
def test_the_robots_side_runs_a_detector_without_torch_and_says_when_pot_is_missing(
    detector: Path, missing: str
) -> None:
    """`missing` cannot be imported in that process, as where it is not installed."""
    code = f"""
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError("not installed")

sys.meta_path.insert(0, Missing())
import real_robot.deploy.deploy
from pathlib import Path
facts = {{"policy_hash": "{"5" * 64}", "embedding": True}}
print(real_robot.deploy.deploy.load_detector(Path({str(detector)!r}), "x", facts).kind, "torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    if missing == "ot":
        assert done.returncode and "float_ot needs POT" in done.stderr and "pip install '.[robot]'" in done.stderr
    else:
        assert done.stdout.split() == ["float_ot", "False"], done.stderr


# --- the tabletop's policy, over ROS 1 ------------------------------------------------------------

over_ros = pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")


@pytest.fixture(scope="module")
def tabletop_detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shipped policy, fitted on a few episodes of the tabletop. Its score rises over every episode, its alpha
    is so large that nearly every one has an alarm."""
    pytest.importorskip("ot", reason="POT is not installed: pip install '.[robot]'")
    folder = tmp_path_factory.mktemp("run") / "failure"
    few = ["failure.fit_on.episodes_per_task=16", "failure.calibrate_on.episodes_per_task=12", "env.num_envs=10"]
    quick = ["failure.alpha=0.9", "failure.detectors=[float_ot]", "failure.band=constant"]
    fit = ["failure", "fit", "tabletop_failure", *few, *quick, "-o", str(folder)]
    command = [sys.executable, "-m", "vla_rl", *fit]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return folder / "detectors" / "float_ot"


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[RosGraph]:
    graph = RosGraph(tmp_path)
    yield graph
    graph.close()


def start(graph: RosGraph, detector: Path, sim: list[str], *options: str) -> Child:
    port = free_port()
    graph.cli("server", "serve", POLICY, "--port", str(port))
    graph.cli("sim", "robot", "sim", *sim, "--master", graph.master.uri)
    slow = ["rate=5", "observation.max_age=2", "safety.observation_timeout=2", "safety.command_timeout=2", "silence=60"]
    slow += ["safety.workspace.meters_per_unit=0.25"]  # a quarter of its speed
    return graph.cli(
        *("deploy", "deploy", "sim_robot", f"transport.master={graph.master.uri}", *slow),
        *("--server", f"127.0.0.1:{port}", "--wait", "300", "--detector", str(detector)),
        *("--log", str(graph.folder / "ticks.jsonl"), *options),
    )


@over_ros
@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_person_is_asked_rewinds_and_labels_over_ros(graph: RosGraph, tabletop_detector: Path) -> None:
    """An episode without an end by itself."""
    scene = ["env.horizons.push_to_zone=1000000", "env.success.hold_steps=1000000", "speed=0.25"]
    port, dataset = free_port(), graph.folder / "dataset"
    child = start(graph, tabletop_detector, scene, "--console", str(port), "--record", str(dataset), "--round", "1")
    until(lambda: child.says("console: http://"), "the console", 300)
    with connect(f"ws://127.0.0.1:{port}/socket", open_timeout=60) as page:
        statuses = 0

        def say(kind: str, **fields: Any) -> None:
            page.send(json.dumps({"type": kind, **fields}))

        def await_status(phases: set[str], scores: list[list[float]]) -> dict[str, Any]:
            nonlocal statuses
            deadline, status = time.monotonic() + 240, None
            while time.monotonic() < deadline:
                if isinstance(data := page.recv(timeout=60), bytes):
                    continue
                status = json.loads(data)
                statuses += status["type"] == "status"
                say("seen", statuses=statuses, pictures=10**6)
                say("alive", sent=time.monotonic())
                scores += status.get("scores", [])
                if status.get("phase") in phases:
                    return status
            raise AssertionError(f"not {phases} in time: {status}, {scores[-5:]}")

        say("take_control", name="anna", token="", force=False)
        say("press", button="start", sent=time.monotonic())
        scores: list[list[float]] = []
        await_status({"autonomous"}, scores)
        await_status({"paused"}, scores)
        assert scores[-1][1] > scores[-1][2] and all(value <= limit for _, value, limit in scores[:-1])
        say("press", button="rewind", sent=time.monotonic())
        await_status({"rewinding"}, scores)
        await_status({"paused"}, scores)
        assert scores[-1][1] <= scores[-1][2]
        say("press", button="failure", sent=time.monotonic())
        await_status({"ended"}, scores)
    until(lambda: child.says("episode: failure (anna)"), "the label")
    assert child.says("episode: alarm (detector: failure score") and child.says("episode: all clear (detector)")
    time.sleep(2)
    child.signal(signal.SIGINT)
    assert child.process.wait(120) == 0, child.output()[-3000:]
    frames = pd.concat(pd.read_parquet(f) for f in sorted((dataset / "data").rglob("*.parquet")))
    known = frames.dropna(subset=["failure_score"])
    assert len(known) > 10 and (known["failure_threshold"] > 0).all()
    assert frames["policy_version"].iloc[0].startswith("tabletop_base ")


@over_ros
@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_of_episodes_writes_alarms_down(graph: RosGraph, tabletop_detector: Path) -> None:
    results = graph.folder / "results.json"
    child = start(graph, tabletop_detector, ["speed=0.25"], "--episodes", "4", "--results", str(results))
    until(lambda: graph.check_alive() or child.process.poll() is not None, "the episodes", 600)
    assert child.process.returncode == 0, child.output()[-3000:]
    assert child.says("alarms in")
    assert len(json.loads(results.read_text())) == 4
    scores = [t["failure"] for t in json_lines(graph.folder / "ticks.jsonl")]
    assert sum(s is not None for s in scores) > 30
