"""Four processes on a real ROS 1 graph: master, `vla-rl serve`, `vla-rl robot sim`, `vla-rl deploy`.

The shipped policy must solve tabletop episodes as often as in the simulator directly, on the same initial states.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, RosGraph, json_lines, missing_ros, until

from real_robot.transports.ros.master import free_port
from vla_rl.config import build_component
from vla_rl.evaluation.statistics import wilson_interval

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]

TASK = "push_to_zone"
NUM_EPISODES = 50
POLICY = "pretrained:tabletop_base"
HORIZON, CHUNK = 32, 8  # of the task, control steps; of the policy, actions


@pytest.fixture(scope="module")
def direct() -> list[tuple[bool, int]]:
    """(success, steps) of the policy, greedy, in the simulator itself."""
    evaluation: Any = importlib.import_module("vla_rl.evaluation.evaluate")
    policy = importlib.import_module("vla_rl.policies.load").load_policy(POLICY)
    policy.eval()
    env = build_component("env", {"kind": "tabletop", "num_envs": 1})
    config = evaluation.EvalConfig(tasks=(TASK,), episodes_per_task=NUM_EPISODES, temperatures=(0.0,), videos=0)
    return [(e.success, e.steps) for e in evaluation.evaluate(policy, env, config).episodes]


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[RosGraph]:
    graph = RosGraph(tmp_path)
    yield graph
    graph.close()


def over_ros(graph: RosGraph, sim: list[str], deploy: list[str]) -> list[tuple[bool, int]]:
    """(success, steps) of the same episodes over the graph."""
    port, results = free_port(), graph.folder / "results.json"
    graph.cli("server", "serve", POLICY, "--port", str(port))
    graph.cli("sim", "robot", "sim", *sim, "--master", graph.master.uri)
    child = graph.cli(
        *("deploy", "deploy", "sim_robot", f"transport.master={graph.master.uri}", *deploy),
        *("--server", f"127.0.0.1:{port}", "--wait", str(4 * PATIENCE), "--log", str(graph.folder / "ticks.jsonl")),
        *("--episodes", str(NUM_EPISODES), "--task", TASK, "--results", str(results)),
    )
    until(lambda: graph.check_alive() or child.process.poll() is not None, "the episodes", 2800)
    assert child.process.returncode == 0, child.output()[-3000:]
    outcomes = json.loads(results.read_text())
    assert [e["index"] for e in outcomes] == list(range(NUM_EPISODES)) and all(
        e["outcome"] in ("solved", "failed") for e in outcomes
    )
    assert max(abs(x) for t in json_lines(graph.folder / "ticks.jsonl") if t["sent"] for x in t["sent"]) <= 1.0
    return [(e["success"], e["steps"]) for e in outcomes]


def check_overlap(ours: list[tuple[bool, int]], theirs: list[tuple[bool, int]]) -> None:
    low, high = wilson_interval(sum(s for s, _ in ours), NUM_EPISODES)
    other_low, other_high = wilson_interval(sum(s for s, _ in theirs), NUM_EPISODES)
    print(f"over ROS {sum(s for s, _ in ours)}, direct {sum(s for s, _ in theirs)} of {NUM_EPISODES}")
    assert low <= other_high and other_low <= high


def test_in_lockstep_each_episode_goes_as_in_the_simulator(graph: RosGraph, direct: list[tuple[bool, int]]) -> None:
    """The simulator waits for each command; pictures are lossless: what differs is float rounding of the pose."""
    patient = [
        "pace_timeout=20",
        "execution.infer_timeout=60",
        "observation.max_age=60",
        "safety.observation_timeout=60",
        "silence=120",
    ]
    found = over_ros(
        graph,
        ["lockstep=true", "image_format=png"],
        ["--synchronous", *patient, "safety.command_timeout=60"],
    )
    check_overlap(found, direct)
    same = sum(a == b for a, b in zip(found, direct, strict=True))
    print(f"{same} of {NUM_EPISODES} episodes ended alike, at the same step")
    assert same >= 0.9 * NUM_EPISODES


def test_in_real_time_with_jpeg_the_success_rate_is_that_of_the_simulator(
    graph: RosGraph, direct: list[tuple[bool, int]]
) -> None:
    """Nothing waits: the simulator steps by its clock, at a quarter of real time so that a busy machine keeps up. The
    robot stands while a chunk is computed, one step at least; the horizon has that step for each chunk, so that the
    policy has as many as in the simulator."""
    patient = ["observation.max_age=1", "safety.observation_timeout=1", "safety.command_timeout=1", "silence=60"]
    slow = ["rate=5", "execution.max_blind=1", "safety.workspace.meters_per_unit=0.25", *patient]
    horizon = HORIZON + -(-HORIZON // CHUNK)
    found = over_ros(graph, ["speed=0.25", f"env.horizons.{TASK}={horizon}"], slow)
    driven = [t for t in json_lines(graph.folder / "ticks.jsonl") if t["mode"] != "inactive"]
    stood = sum(t["source"] != "policy" for t in driven)
    both = [(a, b) for (a, _), (b, _) in zip(found, direct, strict=True)]
    print(
        f"the robot stood at {stood} of {len(driven)} ticks; "
        f"episodes solved over ROS alone {both.count((True, False))}, directly alone {both.count((False, True))}"
    )
    check_overlap(found, direct)
