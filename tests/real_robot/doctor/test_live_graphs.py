"""The doctor at real graphs: robots that are well and others with planted faults, on ROS 1 and over DDS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from patients import LOOPBACK, DdsPatient, Report, Ros1Patient
from processes import missing_ros
from test_robot_check import ARM, CAMERA, COMMAND, FAULTS, STATES, WELL, WRENCH, check_found, planted
from test_shipped_contracts import DRIVERS

pytestmark = pytest.mark.live
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
