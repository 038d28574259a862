"""`vla-rl doctor ROBOT.yaml` on a live graph: a well robot has no fault, and each planted fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import PATIENCE, ROOT, Child, RosGraph, missing_ros, until

PLAYER = str(ROOT / "tests/real_robot/played_robot.py")
needs_ros = pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")
JOINTS = ["shoulder", "elbow", "wrist"]
ARM: dict[str, Any] = {
    "name": "arm",
    "rate": 20,
    "observation": {
        "max_age": 1.0,
        "images": {
            "front": {
                "topic": "/camera/image/compressed",
                "size": [240, 320],
                "rate": 15,
                "align": {"tolerance": 1.0},
            }
        },
        "state": [
            {
                "topic": "/joint_states",
                "type": "sensor_msgs/JointState",
                "joints": JOINTS,
                "frame": "base",
                "rate": 30,
                "align": {"tolerance": 0.8},
            }
        ],
    },
    "action": [
        {
            "topic": "/arm/command",
            "type": "trajectory_msgs/JointTrajectory",
            "indices": [0, 1, 2],
            "joints": JOINTS,
        }
    ],
    "execution": {"kind": "position"},
    "safety": {
        "dimensions": [
            {"name": j, "kind": "position", "state": i, "low": -1, "high": 1, "max_velocity": 1}
            for i, j in enumerate(JOINTS)
        ]
    },
}


def lines(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """The report's lines by name, without those that are well."""
    assert done.stdout, done.stderr[-3000:]
    return {c["name"]: c for c in json.loads(done.stdout)["checks"] if c["status"] != "ok"}


def doctor(contract: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vla_rl.cli", "doctor", str(contract), "--json", "--seconds", "2", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(ARM))
    return path


Examine = Callable[[dict[str, Any]], tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def examine(tmp_path: Path, arm: Path) -> Iterator[Examine]:
    """Plays the arm with faults on a ROS graph, and returns the doctor's exit code and what is not well."""
    graph = RosGraph(tmp_path)

    def play(faults: dict[str, Any]) -> tuple[int, dict[str, dict[str, str]]]:
        player = graph.start("player", PLAYER, str(arm), json.dumps(faults), "{}")
        until(lambda: player.says("ready"), "the player")
        done = doctor(arm, graph.env)
        graph.check_alive()
        assert "commanded" not in player.output(), "the doctor sent a command"
        return done.returncode, lines(done)

    yield play
    graph.close()


@needs_ros
def test_a_robot_that_is_well_has_no_fault(examine: Examine) -> None:
    assert examine({}) == (0, {})


CAMERA, STATES, COMMAND = "/camera/image/compressed", "/joint_states", "/arm/command"
# What is planted, and what the report must say of each line. Several at once: one must not hide another.
FAULTS: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {
            CAMERA: {"topic": "/camera1/image/compressed"},
            STATES: {"rename": {"elbow": "elbow_joint"}},
            COMMAND: {"absent": True},
        },
        {
            CAMERA: "nobody publishes it (near: /camera1/image/compressed)",
            f"{STATES}: joints": "no joint 'elbow' (near: elbow_joint); there are: elbow_joint, shoulder, wrist",
            COMMAND: "nobody listens",
        },
    ),
    (
        {CAMERA: {"type": "sensor_msgs/Image"}, STATES: {"skew": 5}, COMMAND: {"type": "std_msgs/Bool"}},
        {
            CAMERA: "publishes sensor_msgs/Image; the contract reads sensor_msgs/CompressedImage",
            f"{STATES}: clock": "s ahead of this machine's clock",
            COMMAND: "listens for std_msgs/Bool; the contract sends trajectory_msgs/JointTrajectory",
        },
    ),
    (
        {CAMERA: {"size": [48, 64]}, STATES: {"skew": -5, "rate": 4}, COMMAND: {"rival": True}},
        {
            f"{CAMERA}: picture": "48 x 64 (height x width) jpeg, smaller than the 240 x 320",
            STATES: "its driver should send 30",
            f"{STATES}: clock": "s old on arrival; 0.80 s are allowed",
            f"{COMMAND}: others": "two drivers of one robot",
        },
    ),
    ({STATES: {"frame": "world"}}, {f"{STATES}: frame": "'world'; the contract says 'base'"}),
    ({STATES: {"value": 1.5}}, {"safety: elbow": "measured 1.5, outside -1 to 1"}),
]


def check_found(report: tuple[int, dict[str, dict[str, str]]], expected: dict[str, str]) -> None:
    code, found = report
    assert code == 1
    for name, text in expected.items():
        assert text in found[name]["found"] and found[name]["status"] == "wrong" and found[name]["fix"], found


@needs_ros
@pytest.mark.parametrize(("faults", "expected"), FAULTS)
def test_each_planted_fault_is_named(faults: dict[str, Any], expected: dict[str, str], examine: Examine) -> None:
    check_found(examine(faults), expected)


@needs_ros
def test_without_a_master_it_says_so_and_fails(arm: Path) -> None:
    done = doctor(arm, {**os.environ, "ROS_MASTER_URI": "http://127.0.0.1:9"})
    assert done.returncode == 1 and "no ROS master answers at http://127.0.0.1:9" in lines(done)["transport"]["found"]


# --- DDS ---------------------------------------------------------------------------------------

LOOPBACK = """<CycloneDDS><Domain><General><Interfaces><NetworkInterface name="lo"/></Interfaces>
<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>
<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""


@pytest.fixture
def examine_dds(tmp_path: Path) -> Iterator[Examine]:
    """As `examine`, over DDS."""
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed: pip install 'vla-rl[ros]'")
    domain = 1 + time.time_ns() % 200
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump({**ARM, "transport": {"kind": "ros2", "domain": domain}}))
    path_of_imports = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "CYCLONEDDS_URI": LOOPBACK, "PYTHONPATH": path_of_imports, "PYTHONUNBUFFERED": "1"}
    children = []

    def play(faults: dict[str, Any]) -> tuple[int, dict[str, dict[str, str]]]:
        command = [sys.executable, PLAYER, str(path), json.dumps(faults), "{}"]
        children.append(Child(command, tmp_path / "player.log", env))
        until(lambda: children[0].says("ready"), "the player")
        done = doctor(path, env)
        assert children[0].process.poll() is None, children[0].output()
        assert "commanded" not in children[0].output(), "the doctor sent a command"
        return done.returncode, lines(done)

    yield play
    for child in children:
        child.kill()


def test_over_dds_a_robot_that_is_well_has_no_fault(examine_dds: Examine) -> None:
    assert examine_dds({}) == (0, {})


DDS_FAULTS = [
    FAULTS[0],
    (
        {
            CAMERA: {"type": "sensor_msgs/Image"},
            STATES: {"qos": {"reliability": "best_effort"}},
            COMMAND: {"rival": True},
        },
        {
            CAMERA: "publishes sensor_msgs/Image; the contract reads sensor_msgs/CompressedImage",
            STATES: "its publisher is best_effort, which a reliable reader never hears",
            f"{COMMAND}: others": "two drivers of one robot",
        },
    ),
]


@pytest.mark.parametrize(("faults", "expected"), DDS_FAULTS)
def test_over_dds_each_planted_fault_is_named(
    faults: dict[str, Any], expected: dict[str, str], examine_dds: Examine
) -> None:
    check_found(examine_dds(faults), expected)


# --- LeRobot -----------------------------------------------------------------------------------


def test_a_robot_of_lerobots_is_not_connected_unless_asked(tmp_path: Path) -> None:
    """So that its motors stay off: the port is not even opened. What can be known without is checked."""
    values = yaml.safe_load((ROOT / "tests/real_robot/kinematic_arm.yaml").read_text())
    values["observation"]["state"][0]["joints"][1] = "sholder.pos"
    values["transport"]["port"] = "missing"
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(values))
    here = os.pathsep.join([str(ROOT), str(ROOT / "tests/real_robot"), os.environ.get("PYTHONPATH", "")])
    done = doctor(path, {**os.environ, "PYTHONPATH": here})
    found = lines(done)
    assert done.returncode == 1
    assert "no 'sholder.pos' (near: shoulder.pos" in found["observation"]["found"]
    assert "missing is not there" in found["transport.port"]["found"]
    assert "turns the motors on" in found["live"]["found"] and "--connect" in found["live"]["fix"]
