"""`deploy --episodes` tells a policy's failures from what was no try at all, on a real graph with real servers.

A policy that never solves its task, so that each episode lasts to its horizon.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deployment import RATE, SILENCE, Deployment
from light_server import CHUNK, LATE
from processes import json_lines, missing_ros, until

from real_robot.contract.load import load_contract

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]

HORIZON = 60  # control steps, six seconds


class Evaluation(Deployment):
    """Four episodes, and what came of them."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        behavior: str = "normal",
        overrides: tuple[str, ...] = (),
        horizon: int = HORIZON,
    ) -> None:
        self.results_file = folder / "results.json"
        sim = [f"env.horizons.push_to_zone={horizon}", "env.success.hold_steps=10"]
        chosen = ("--episodes", "4", "--results", str(self.results_file), *options)
        super().__init__(folder, behavior=behavior, sim=sim, options=chosen, overrides=overrides)

    def episode(self) -> int:
        """How many episodes have begun: the steps of the log start anew."""
        steps = [line["step"] for line in json_lines(self.ticks) if line["mode"] == "running"]
        return sum(a > b for a, b in itertools.pairwise(steps)) + bool(steps)

    def await_episode(self, number: int) -> None:
        until(lambda: self.graph.check_alive() or self.episode() >= number, f"episode {number}", 120)
        self.await_motion()

    def swap_server(self, behavior: str) -> None:
        """Another policy, behind the same address."""
        self.server.kill()
        self.graph.children.remove(self.server)
        self.behavior = behavior
        self.server = self.start_server()

    def end(self) -> int:
        until(lambda: self.deploy.process.poll() is not None, "the end of the run", 240)
        return self.deploy.process.returncode

    def results(self) -> list[dict[str, Any]]:
        return json.loads(self.results_file.read_text())

    def said(self, text: str) -> list[str]:
        return [line for line in self.deploy.output().splitlines() if text in line]


Start = Callable[..., Evaluation]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Evaluation] = []

    def go(*options: str, **kwargs: Any) -> Evaluation:
        running.append(Evaluation(tmp_path, *options, **kwargs))
        return running[-1]

    yield go
    for evaluation in running:
        evaluation.close()


def test_an_able_policy_that_fails_has_failed(start: Start) -> None:
    run = start()
    assert run.end() == 0, run.deploy.output()[-2000:]
    assert [(e["index"], e["outcome"], e["success"], e["attempt"]) for e in run.results()] == [
        (i, "failed", False, 1) for i in range(4)
    ]
    assert all(0 < e["without_action"] < 0.5 and e["policy"] == "1" for e in run.results())
    assert run.said("push_to_zone: 0 solved, 4 failed, 0 void")
    assert any("n = 4" in line and "0.0 % [0.0, " in line for line in run.said("push_to_zone: "))


def test_a_server_that_dies_makes_episodes_void_and_ends_the_run(start: Start) -> None:
    run = start("--reruns", "0")
    run.await_episode(2)
    killed = time.monotonic()
    run.server.kill()
    run.graph.children.remove(run.server)
    assert run.end() == 2, run.deploy.output()[-2000:]
    print_last_motion(run, killed)
    outcomes = [e["outcome"] for e in run.results()]
    assert outcomes == ["failed", "void", "not run", "not run"] and not any(e["success"] for e in run.results())
    reason = run.results()[1]["reason"]
    assert re.search(
        rf"stopped: no action for {SILENCE:g} s: .*(lost the|no) policy server .*127.0.0.1:{run.port}", reason
    )
    assert run.said("push_to_zone: 0 solved, 1 failed, 1 void, 2 not run")
    assert run.said("no rate and no interval") and not run.said("n = ")
    assert run.said("error: 3 of 4 episodes have no outcome")


def test_a_server_that_dies_ends_the_run_also_where_each_episode_is_shorter_than_its_silence(start: Start) -> None:
    run = start("--episodes", "30", "--reruns", "0", horizon=int(SILENCE * RATE) // 2)
    run.await_episode(2)
    run.server.kill()
    run.graph.children.remove(run.server)
    assert run.end() == 2, run.deploy.output()[-2000:]
    outcomes = [e["outcome"] for e in run.results()]
    assert outcomes.count("void") <= 4 and outcomes[-20:] == ["not run"] * 20, outcomes
    found = re.search(rf"no action for {SILENCE:g} s: (.*)", run.results()[-1]["reason"])
    assert found and "Connection refused" in found[1] and "`vla-rl serve`" in found[1]


def test_a_policy_that_is_late_is_void_however_its_episodes_end_and_runs_again(start: Start) -> None:
    run = start("--episodes", "2", "--max-without-action", "0.4", behavior="late", overrides=(f"silence={10 * LATE}",))
    assert run.end() == 2, run.deploy.output()[-2000:]
    found = [(e["index"], e["outcome"], e["attempt"]) for e in run.results()]
    assert found == [(0, "void", 1), (1, "void", 1), (0, "void", 2), (1, "void", 2)]
    assert all(e["without_action"] > 0.4 and "no action at more than 40 %" in e["reason"] for e in run.results())
    assert run.said("push_to_zone: 0 solved, 0 failed, 2 void (2 were void and run again)")
    assert run.said("no rate and no interval")


def test_a_short_outage_costs_one_attempt(start: Start) -> None:
    run = start(overrides=("silence=60",))
    run.await_episode(2)
    run.server.signal(signal.SIGSTOP)  # It hangs.
    hung = time.monotonic()
    until(lambda: run.episode() >= 3 or time.monotonic() - hung > 0.8 * HORIZON / RATE, "most of the episode", 60)
    run.server.signal(signal.SIGCONT)
    assert run.end() == 0, run.deploy.output()[-2000:]
    found = {(e["index"], e["attempt"]): e["outcome"] for e in run.results()}
    assert found == {(0, 1): "failed", (1, 1): "void", (2, 1): "failed", (3, 1): "failed", (1, 2): "failed"}
    assert run.said("push_to_zone: 0 solved, 4 failed, 0 void (1 were void and run again)") and run.said("n = 4")


def test_another_policy_in_mid_run_ends_it(start: Start, tmp_path: Path) -> None:
    run = start("--record", str(tmp_path / "recorded"), overrides=("silence=60",))
    run.await_episode(2)
    run.swap_server("second")
    assert run.end() == 2, run.deploy.output()[-2000:]
    assert [e["outcome"] for e in run.results()] == ["failed", "void", "not run", "not run"]
    assert (
        run.results()[1]["reason"] == "the policy server now serves 2, in place of 1: it acts from the next episode on"
    )
    assert run.said("policy: the policy server now serves 2, in place of 1")
    assert policies(tmp_path / "recorded") == [["1"]], "nothing of the second policy was executed"
    features = json.loads((tmp_path / "recorded/meta/info.json").read_text())["features"]
    contract = load_contract("sim_robot")
    assert tuple(features["action"]["names"]) == contract.action_names
    assert tuple(features["observation.state"]["names"]) == contract.observation.state_names


def test_another_policy_that_is_allowed_goes_on_and_is_told_apart(start: Start, tmp_path: Path) -> None:
    run = start("--record", str(tmp_path / "recorded"), "--allow-policy-change", overrides=("silence=60",))
    run.await_episode(2)
    run.swap_server("second")
    assert run.end() == 0, run.deploy.output()[-2000:]
    found = [(e["index"], e["outcome"], e["policy"]) for e in run.results()]
    assert found[0] == (0, "failed", "1") and found[1][:2] == (1, "void") and found[-1] == (1, "failed", "2")
    assert run.said("push_to_zone by 1: ") and run.said("push_to_zone by 2: ")
    assert policies(tmp_path / "recorded") == [["1"], ["2"], ["2"], ["2"]]


def print_last_motion(robot: Deployment, since: float) -> None:
    moved = [line["time"] for line in json_lines(robot.trace) if line["twist"] and any(line["twist"])]
    print(f"last motion after {1000 * (max(moved) - since):.0f} ms; a chunk lasts {1000 * CHUNK / RATE:.0f}")


def policies(dataset: Path) -> list[list[str]]:
    """Of each recorded episode, the policies of its frames."""
    frames = pd.concat(pd.read_parquet(file) for file in sorted((dataset / "data").rglob("*.parquet")))
    return [sorted(set(group["policy_version"])) for _, group in frames.groupby("episode_index")]
