"""`vla-rl doctor ROBOT.yaml`: a well robot has no fault, and each planted fault is named.

On a graph in memory, in virtual time; test_live_graphs.py has it look at ROS 1 and DDS.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from patients import Report, examine, report_of
from processes import ROOT, missing_ros
from typer.testing import CliRunner
from virtual_time import VirtualTime

from real_robot.contract.load import load_contract
from real_robot.doctor.listen import Findings, Heard
from real_robot.doctor.robot_check import judge
from real_robot.doctor.topics import check_source
from real_robot.transports.base import Endpoint
from vla_rl.cli.app import app
from vla_rl.common.tables import Check

JOINTS = ["shoulder", "elbow", "wrist"]
ARM: dict[str, Any] = {
    "name": "arm",
    "rate": 20,
    "transport": {"kind": "ros1"},
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
        ],
        "observation_timeout": 0.4,
        "wrench": {"topic": "/wrench", "max_force": 20, "max_torque": 5},
    },
}


CAMERA, STATES, COMMAND = "/camera/image/compressed", "/joint_states", "/arm/command"
WRENCH = "/wrench"
WELL: dict[str, Any] = {
    "publish": [
        {"topic": CAMERA, "type": "sensor_msgs/CompressedImage", "size": [480, 640], "rate": 15},
        {"topic": STATES, "type": "sensor_msgs/JointState", "joints": JOINTS, "frame": "base", "rate": 30},
        {"topic": WRENCH, "type": "geometry_msgs/WrenchStamped", "values": [5, 0, 0, 1, 0, 0], "rate": 30},
    ],
    "listen": [{"topic": COMMAND, "type": "trajectory_msgs/JointTrajectory"}],
}


def planted(faults: dict[str, Any]) -> dict[str, Any]:
    """The graph of a robot that is well but for these: topic -> what is different there; None: not there."""
    graph = copy.deepcopy(WELL)
    for role in ("publish", "listen"):
        kept = [entry for entry in graph[role] if faults.get(entry["topic"], {}) is not None]
        graph[role] = [{**entry, **faults.get(entry["topic"], {})} for entry in kept]
    rivals = [entry for entry in graph["listen"] if entry.pop("rival", False)]
    return {**graph, "advertise": rivals}


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(ARM))
    return path


@pytest.mark.parametrize("kind", ["ros1", "ros2"])
def test_a_robot_that_is_well_has_no_fault(
    kind: str, tmp_path: Path, virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump({**ARM, "transport": {"kind": kind}}))
    assert examine(virtual, monkeypatch, str(path), WELL) == {}


# What is planted, and what the report must say of each line. Several at once: one must not hide another.
FAULTS: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {
            CAMERA: {"topic": "/camera1/image/compressed"},
            STATES: {"joints": ["shoulder", "elbow_joint", "wrist"]},
            COMMAND: None,
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
            f"{STATES}: clock": "stamps are 5.00 s ahead of this machine's clock",
            COMMAND: "listens for std_msgs/Bool; the contract sends trajectory_msgs/JointTrajectory",
        },
    ),
    (
        {CAMERA: {"size": [48, 64]}, STATES: {"skew": -5, "rate": 4}, COMMAND: {"rival": True}},
        {
            f"{CAMERA}: picture": "48 x 64 (height x width) jpeg, smaller than the 240 x 320",
            STATES: "4.0 a second, gaps of 250 ms at most (95 %); its driver should send 30",
            f"{STATES}: clock": "stamps are 5.00 s old on arrival; 0.80 s are allowed",
            f"{COMMAND}: others": "two drivers of one robot",
        },
    ),
    (
        {STATES: {"frame": "world"}, WRENCH: {"values": [15, 16, 0, 1, 0, 0]}},
        {
            f"{STATES}: frame": "'world'; the contract says 'base'",
            "safety: wrench": "force is 21.9 N, at most 20 is allowed",
        },
    ),
    (
        {WRENCH: {"rate": 2}},
        {"safety: wrench": "gaps of 500 ms (95 %); beyond safety.observation_timeout it holds"},
    ),
    (
        {STATES: {"values": [0, 1.5, 0]}, WRENCH: None},
        {WRENCH: "nobody publishes it", "safety: elbow": "measured 1.5, outside -1 to 1"},
    ),
]


def check_found(found: Report, expected: dict[str, str]) -> None:
    for name, text in expected.items():
        assert text in found[name].found and found[name].status == "wrong" and found[name].fix, found


@pytest.mark.parametrize(("faults", "expected"), FAULTS)
def test_each_planted_fault_is_named(
    faults: dict[str, Any], expected: dict[str, str], arm: Path, virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examine(virtual, monkeypatch, str(arm), planted(faults))
    check_found(found, expected)
    lines = {line for topic in faults for line in found if line.startswith(topic)}
    assert set(found) - lines <= {*expected, "observation"}, "nothing else is blamed"


def test_over_dds_a_publisher_that_a_reliable_reader_never_hears_is_named(
    tmp_path: Path, virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump({**ARM, "transport": {"kind": "ros2"}}))
    found = examine(virtual, monkeypatch, str(path), planted({STATES: {"reliability": "best_effort"}}))
    check_found(found, {STATES: "its publisher is best_effort, which a reliable reader never hears"})


def test_without_a_master_it_says_so_and_fails(arm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing_ros():
        pytest.skip(reason)
    monkeypatch.setenv("ROS_MASTER_URI", "http://127.0.0.1:9")
    code, found = told(str(arm))
    assert code == 1 and "no ROS master answers at http://127.0.0.1:9" in found["transport"].found


def told(contract: str) -> tuple[int, Report]:
    """The program's exit code and report."""
    result = CliRunner().invoke(app, ["doctor", contract, "--json", "--seconds", "1"])
    return result.exit_code, report_of([Check(**check) for check in json.loads(result.output)["checks"]])


# --- of what was found -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("publisher", "status", "text"),
    [
        ({}, "ok", "/stop has a publisher"),
        (
            {"type": "std_msgs/Empty"},
            "wrong",
            "/button publishes std_msgs/Empty, which is not heard: deploy reads",
        ),
        (
            {"reliability": "best_effort"},
            "wrong",
            "is best_effort, which deploy, a reliable reader, never hears",
        ),
        (None, "warning", "nobody publishes /stop"),
    ],
)
def test_a_stop_button_that_is_not_heard_is_named(publisher: dict[str, str] | None, status: str, text: str) -> None:
    told = {"topic": "/stop", "type": "std_msgs/Bool", "node": "/button", "reliability": "reliable"}
    graph = [] if publisher is None else [Endpoint(publishes=True, **(told | publisher))]
    findings = Findings({}, 1.0, None, graph, {}, {}, None, {})
    found = next(c for c in judge(load_contract("franka_servo"), findings) if c.name == "operator.stop")
    assert found.status == status and text in found.found


@pytest.mark.parametrize(
    ("graph", "refused", "text"),
    [
        ([(STATES, "sensor_msgs/JointState")], {}, "nothing came, though /driver announces it"),
        ([(STATES, "sensor_msgs/JointState")], {STATES: {"unreadable": 3}}, "3 messages not readable"),
        (
            [("/joint_state", "sensor_msgs/JointState"), ("/joint_statez", "std_msgs/String")],
            {},
            "nobody publishes it (near: /joint_state)",
        ),
    ],
)
def test_why_nothing_came(
    arm: Path, graph: list[tuple[str, str]], refused: dict[str, dict[str, int]], text: str
) -> None:
    ends = [Endpoint(topic, kind, "/driver", True, "reliable") for topic, kind in graph]
    [source] = load_contract(arm).observation.state
    [check] = check_source("state", source, STATES, Findings({}, 0.0, None, ends, refused, {}, None, {}))
    assert check.status == "wrong" and check.found == text


def test_what_is_heard_once_has_no_rate() -> None:
    heard = Heard()
    for number, (rate, gap) in enumerate(((0.0, math.inf), (4.0, 0.25), (4.0, 0.25))):
        heard.times.append((10 + 0.25 * number, 0.0))
        assert (heard.rate, heard.gap) == (rate, gap)


# --- LeRobot -----------------------------------------------------------------------------------


def test_a_robot_of_lerobots_is_not_connected_unless_asked(tmp_path: Path) -> None:
    """So that its motors stay off: the port is not even opened. What can be known without is checked."""
    values = yaml.safe_load((ROOT / "tests/real_robot/kinematic_arm.yaml").read_text())
    values["observation"]["state"][0]["joints"][1] = "sholder.pos"
    values["transport"]["port"] = "missing"
    values["observation"]["images"]["side"] = {"camera": {"kind": "opencv", "index": 3}}
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(values))
    code, found = told(str(path))
    assert code == 1
    assert "no 'sholder.pos' (near: shoulder.pos" in found["observation"].found
    assert "missing is not there" in found["transport.port"].found
    assert "" not in found, "a camera of this machine is none of the robot's"
    assert "turns the motors on" in found["live"].found and "--connect" in found["live"].fix
