"""A lab's own robot without a simulator, as docs/your_robot.md has it: recordings, page, cloning, errors, deploy.

Real processes throughout: the commands that a person types. The policies learn nothing in so few steps; what is shown
is that each step takes what the one before it wrote, for 6, 14 and 7 numbers of the action.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from own_recordings import INSTRUCTION, aloha, robomimic, so101
from processes import ROOT, Child, RosGraph, json_lines, missing_ros, until

from real_robot.transports.ros.master import free_port
from vla_rl.data.source import LeRobotSource

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1800)]
ROBOTS = ROOT / "real_robot" / "contract" / "robots"
CLONING = """
base: robot_sft
name: own
env: {{dataset: {dataset}}}
policy: {{cameras: {cameras}, image_size: 32, action_bins: 64, chunk_size: 4, precision: fp32}}
sft: {{datasets: {dataset}, image_size: 48, batch_size: 8, steps: 4, validation_fraction: 0.4}}
device: cpu
"""
PATIENT = ("silence=120", "observation.max_age=5", "safety.observation_timeout=5", "safety.command_timeout=5")


class Lab:
    """A folder with recordings, and the programs that are run there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.children = folder, list[Child]()
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/real_robot", "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: object) -> str:
        """A command of vla-rl, to its end; returns what it printed."""
        command = [sys.executable, "-m", "vla_rl", *map(str, arguments)]
        done = subprocess.run(
            command, check=False, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{arguments[0]}: {done.stdout}\n{done.stderr[-4000:]}"
        return done.stdout

    def start(self, name: str, *arguments: object) -> Child:
        command = [sys.executable, "-m", "vla_rl", *map(str, arguments)]
        self.children.append(Child(command, self.folder / f"{name}.log", self.env))
        return self.children[-1]

    def learn(self, dataset: Path, cameras: Sequence[str]) -> Path:
        """Page, cloning, action errors; returns the policy's folder."""
        assert "report:" in self.run("report", dataset) and (dataset / "report.html").is_file()
        recipe = self.folder / "own.yaml"
        recipe.write_text(CLONING.format(dataset=dataset, cameras=list(cameras)))
        self.run("sft", recipe, "-o", self.folder / "run")
        policy = self.folder / "run" / "policy"
        said = self.run("eval", self.folder / "run/config.yaml", f"policy.path={policy}", "-o", self.folder / "eval")
        assert "An action error is not success" in " ".join(said.split())
        found = json.loads((self.folder / "eval" / "action_errors" / "policy.json").read_text())
        assert [one["name"] for one in found["dimensions"]] == list(LeRobotSource(dataset).action_names)
        assert found["num_episodes"] == 2 and (self.folder / "eval" / "report.html").is_file()
        return policy

    def deploy(self, policy: Path, contract: Path | str, *overrides: str) -> list[dict[str, Any]]:
        """Serve the policy and deploy it until it has driven the robot; returns the ticks in which it did."""
        port, log = free_port(), self.folder / "ticks.jsonl"
        self.start("server", "serve", policy, "--port", port)
        options = (
            "--server",
            f"127.0.0.1:{port}",
            "--wait",
            400,
            "--log",
            log,
            "--start",
            "--instruction",
            INSTRUCTION,
        )
        deploy = self.start("deploy", "deploy", contract, *PATIENT, *overrides, *options)

        def sent() -> list[dict[str, Any]]:
            assert deploy.process.poll() is None, deploy.output()[-4000:]
            return [tick for tick in json_lines(log) if tick["sent"] and tick["mode"] == "running"]

        until(lambda: len(sent()) > 20, "20 ticks in which the policy drove", 600)
        ticks = sent()
        assert deploy.end() in (0, -15, 143), deploy.output()[-4000:]
        return ticks


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for child in made.children:
        child.kill()


def aloha_contract(trace: Path, names: Sequence[str], cameras: Sequence[str]) -> dict[str, Any]:
    """The contract of two arms with 14 joints in all."""
    joints = {"topic": "", "type": "sensor_msgs/JointState", "joints": [*names]}
    limits = {"kind": "position", "low": -1.5, "high": 1.5, "max_velocity": 1.0}
    return {
        "name": "own_aloha",
        "rate": 50,
        "transport": arm(names, cameras, trace, 50),
        "observation": {
            "images": {one: {"topic": one, "type": "sensor_msgs/Image", "align": {"tolerance": 1}} for one in cameras},
            "state": [{**joints, "topic": "observation", "align": {"tolerance": 1}}],
        },
        "action": [{**joints, "topic": "action", "indices": [*range(14)]}],
        "execution": {"kind": "position"},
        "safety": {"dimensions": [{"name": name, "state": i, **limits} for i, name in enumerate(names)]},
    }


def arm(names: Sequence[str], cameras: Sequence[str], trace: Path, rate: int) -> dict[str, Any]:
    """The transport of an arm of such joints."""
    settings = {"joints": [*names], "views": [*cameras], "trace": str(trace), "calibration_dir": str(trace.parent)}
    return {"kind": "lerobot", "robot": "joint_arm", "id": "own", "modules": ["joint_arm"], "read_hz": rate,
            "settings": settings}  # fmt: skip


def check_followed(trace: Path, names: Sequence[str], ticks: Sequence[dict[str, Any]]) -> None:
    """The robot was told all of its numbers, by name, and was moved."""
    told = [json.loads(line) for line in trace.read_text().splitlines()]
    assert told and all(set(line) == set(names) for line in told)
    values = np.array([tick["sent"] for tick in ticks])
    assert values.shape[1] == len(names) and np.ptp(values, axis=0).max() > 0


def test_an_so101_recorded_by_lerobot(lab: Lab) -> None:
    dataset = so101(lab.folder / "so101", episodes=5)
    policy = lab.learn(dataset, ("front", "wrist"))
    trace, names = lab.folder / "trace.jsonl", LeRobotSource(dataset).action_names
    contract = yaml.safe_load((ROBOTS / "so101.yaml").read_text())  # The contract that ships, of another arm.
    contract["transport"] = arm(names, ("front", "wrist"), trace, 30)
    (lab.folder / "own_so101.yaml").write_text(yaml.safe_dump(contract))
    check_followed(trace, names, lab.deploy(policy, lab.folder / "own_so101.yaml"))


def test_aloha_recordings(lab: Lab) -> None:
    cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    dataset = lab.folder / "dataset"
    lab.run("import", aloha(lab.folder / "aloha", episodes=5), "-o", dataset, "--instruction", INSTRUCTION)
    policy = lab.learn(dataset, cameras)
    trace, names = lab.folder / "trace.jsonl", LeRobotSource(dataset).action_names
    (lab.folder / "own_aloha.yaml").write_text(yaml.safe_dump(aloha_contract(trace, names, cameras)))
    check_followed(trace, names, lab.deploy(policy, lab.folder / "own_aloha.yaml"))


@pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")
def test_robomimic_recordings_of_a_hand_that_robot_sim_has_too(lab: Lab) -> None:
    dataset = lab.folder / "dataset"
    lab.run("import", robomimic(lab.folder / "demos.hdf5", episodes=5), "-o", dataset, "--instruction", INSTRUCTION)
    policy = lab.learn(dataset, ("agentview",))
    graph = RosGraph(lab.folder)
    try:
        trace = lab.folder / "trace.jsonl"
        graph.cli("sim", "robot", "sim", "speed=0.5", f"trace={trace}", "--master", graph.master.uri)
        state = yaml.safe_load((ROBOTS / "sim_robot.yaml").read_text())["observation"]["state"]
        state[0]["parts"] = ["position", "quaternion"]  # As robomimic's nine numbers have the hand's turn.
        del state[0]["axis_angle_near"]
        overrides = [f"transport.master={graph.master.uri}", f"observation.state={json.dumps(state)}"]
        overrides += ["rate=10", "pace_timeout=0.3", "execution.max_blind=4", "episode={begin: '', reset: ''}"]
        ticks = lab.deploy(policy, "sim_robot", *overrides)
        assert np.ptp(np.array([tick["sent"] for tick in ticks])[:, :6]) > 0
        until(lambda: any(line["twist"] and np.any(line["twist"]) for line in json_lines(trace)), "a twist followed")
    finally:
        graph.close()
