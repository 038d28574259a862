"""The doctor at real graphs: robots that are well and others with planted faults, on ROS 1 and over DDS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from patients import DdsPatient, FastDdsPatient, Report, Ros1Patient, leave
from processes import LOOPBACK, missing_ros, missing_ros2, until
from test_robot_check import ARM, CAMERA, COMMAND, FAULTS, STATES, WELL, WRENCH, check_found, planted
from test_shipped_contracts import DRIVERS

from real_robot.transports.action_types import ACTIONS, SERVICES, TriggerRequest
from real_robot.transports.actions import Answer
from real_robot.transports.base import TransportError
from real_robot.transports.configs import Ros2Config
from real_robot.transports.ros2 import Ros2Transport

pytestmark = pytest.mark.live
needs_ros2 = pytest.mark.skipif(bool(missing_ros2()), reason=missing_ros2() or "ROS 2 is there")
needs_ros = pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")


@pytest.fixture(scope="module")
def ros1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ros1Patient]:
    patient = Ros1Patient(tmp_path_factory.mktemp("ros1"))
    yield patient
    patient.close()


@pytest.fixture
def dds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DdsPatient]:
    pytest.importorskip("cyclonedds", reason="cyclonedds is not installed: pip install '.[ros]'")
    monkeypatch.setenv("CYCLONEDDS_URI", LOOPBACK)
    patient = DdsPatient(tmp_path)
    yield patient
    patient.close()


@pytest.fixture
def fast_dds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastDdsPatient]:
    monkeypatch.setenv("CYCLONEDDS_URI", LOOPBACK)
    patient = FastDdsPatient(tmp_path)
    yield patient
    patient.close()


def arm(folder: Path, kind: str) -> str:
    path = folder / "arm.yaml"
    path.write_text(yaml.safe_dump({**ARM, "transport": {"kind": kind}}))
    return str(path)


def is_well(report: Report) -> bool:
    return not any(check.is_fault for check in report.values())


def names(expected: dict[str, str]) -> Callable[[Report], bool]:
    """Whether a report has these faults: line -> what it must say."""
    return lambda report: all(name in report and text in report[name].found for name, text in expected.items())


# Several at once: one must not hide another.
MISSING = FAULTS[0]
OF_ANOTHER_KIND: tuple[dict[str, Any], dict[str, str]] = (
    {
        CAMERA: {"type": "sensor_msgs/Image"},
        STATES: {"skew": 5, "frame": "world"},
        COMMAND: {"type": "std_msgs/Bool", "rival": True},
        WRENCH: {"values": [15, 16, 0, 1, 0, 0]},
    },
    {
        CAMERA: "publishes sensor_msgs/Image; the contract reads sensor_msgs/CompressedImage",
        f"{STATES}: clock": "s ahead of this machine's clock",
        f"{STATES}: frame": "'world'; the contract says 'base'",
        COMMAND: "listens for std_msgs/Bool; the contract sends trajectory_msgs/JointTrajectory",
        f"{COMMAND}: others": "two drivers of one robot",
        "safety: wrench": "force is 21.9 N, at most 20 is allowed",
    },
)
UNHEARD: tuple[dict[str, Any], dict[str, str]] = (
    {**OF_ANOTHER_KIND[0], STATES: {"reliability": "best_effort"}, COMMAND: {"rival": True}},
    {
        CAMERA: "publishes sensor_msgs/Image; the contract reads sensor_msgs/CompressedImage",
        STATES: "its publisher is best_effort, which a reliable reader never hears",
        f"{COMMAND}: others": "two drivers of one robot",
    },
)


@needs_ros
def test_on_ros_1_a_robot_that_is_well_has_no_fault(ros1: Ros1Patient, tmp_path: Path) -> None:
    assert ros1.examine(arm(tmp_path, "ros1"), WELL, lambda report: not report) == {}


@needs_ros
@pytest.mark.parametrize(("faults", "expected"), [MISSING, OF_ANOTHER_KIND], ids=["missing", "of another kind"])
def test_on_ros_1_each_planted_fault_is_named(
    ros1: Ros1Patient, tmp_path: Path, faults: dict[str, Any], expected: dict[str, str]
) -> None:
    check_found(ros1.examine(arm(tmp_path, "ros1"), planted(faults), names(expected)), expected)


def test_over_dds_a_robot_that_is_well_has_no_fault(dds: DdsPatient, tmp_path: Path) -> None:
    assert dds.examine(arm(tmp_path, "ros2"), WELL, lambda report: not report) == {}


@pytest.mark.parametrize(("faults", "expected"), [MISSING, UNHEARD], ids=["missing", "unheard"])
def test_over_dds_each_planted_fault_is_named(
    dds: DdsPatient, tmp_path: Path, faults: dict[str, Any], expected: dict[str, str]
) -> None:
    check_found(dds.examine(arm(tmp_path, "ros2"), planted(faults), names(expected)), expected)


def check_is_well(found: Report) -> None:
    """But for what a busy machine misses, and the warnings of test_shipped_contracts.py."""
    assert all(not check.is_fault or "this machine is overloaded" in check.fix for check in found.values()), found


@needs_ros
def test_a_shipped_contract_on_ros_1(ros1: Ros1Patient) -> None:
    check_is_well(ros1.examine("franka_ros1", DRIVERS["franka_ros1"], is_well))


@pytest.mark.parametrize("name", ["aloha", "franka_servo"])
def test_shipped_contracts_over_dds(dds: DdsPatient, name: str) -> None:
    """Raw pictures and the makers' own messages; poses and wrenches of best effort, and an action's server."""
    check_is_well(dds.examine(name, DRIVERS[name], is_well))


def test_a_gripper_of_a_newer_driver_is_told_apart(dds: DdsPatient) -> None:
    """ros2_robotiq_gripper serves GripperCommand on humble, ParallelGripperCommand since Jazzy, by the same name."""
    name = "/robotiq_gripper_controller/gripper_cmd"
    newer = {**DRIVERS["ur5e_ros2"], "actions": [{"name": name, "type": "control_msgs/ParallelGripperCommand"}]}
    found = dds.examine("ur5e_ros2", newer, lambda report: name in report)
    assert found[name].is_fault and "takes ParallelGripperCommand_SendGoal_Request" in found[name].found, found


@needs_ros2
@pytest.mark.parametrize("name", ["ur5e_ros2", "trossen_ros2", "franka_ros2", "franka_servo", "aloha"])
def test_shipped_contracts_against_fast_dds(fast_dds: FastDdsPatient, name: str) -> None:
    """Topics are heard as on cyclonedds; goals are refused, with the reason. The maker's own messages are not there."""
    makers = [e["topic"] for e in DRIVERS[name]["listen"] if e["type"].startswith("interbotix")]
    graph = {**DRIVERS[name], "listen": [e for e in DRIVERS[name]["listen"] if e["topic"] not in makers]}
    actions = [action["name"] for action in graph.get("actions", ())]
    expected = dict.fromkeys(makers, "") | dict.fromkeys(actions, "its server is on Fast DDS (rmw_fastrtps)")

    def is_expected(report: Report) -> bool:
        return names(expected)(report) and sum(check.is_fault for check in report.values()) == len(expected)

    found = fast_dds.examine(name, graph, is_expected)
    check_found({line: check for line, check in found.items() if line in expected}, expected)
    check_is_well({line: check for line, check in found.items() if line not in expected})
    assert all("transport.kind: rclpy" in found[action].fix for action in actions)


@needs_ros2
def test_a_service_on_fast_dds_is_refused_and_never_called(fast_dds: FastDdsPatient) -> None:
    """Its bytes would be read as other fields. Both where the server comes later, and where it is known before."""
    name, answers, domain = "/gripper/_action/send_goal", list[Answer](), 201
    transport = Ros2Config(domain=domain).open()
    assert isinstance(transport, Ros2Transport)
    early = transport.service(name, SERVICES["std_srvs/Trigger"])
    action = {"name": "/gripper", "type": "control_msgs/GripperCommand"}
    player = fast_dds.play({"publish": [], "listen": [], "actions": [action]}, domain)
    until(lambda: early.ready, "the server")
    early.call(TriggerRequest(), answers.append)
    assert "its server is on Fast DDS (rmw_fastrtps), whose services and actions" in str(answers)
    with pytest.raises(TransportError, match=r"set transport\.kind: rclpy"):
        transport.service(name, SERVICES["std_srvs/Trigger"])
    with pytest.raises(TransportError, match=r"set transport\.kind: rclpy"):
        transport.action("/gripper", ACTIONS["control_msgs/GripperCommand"])
    transport.close()
    leave(player)
