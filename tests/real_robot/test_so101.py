"""LeRobot's SO-101 classes, with the servos' SDK, on a serial line of simulated servos, by the shipped contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from feetech_bus import GOAL, FeetechBus
from processes import until

from real_robot.contract import RobotContract, load_contract
from real_robot.robot import TopicRobot
from real_robot.transports.base import TransportError

pytest.importorskip("scservo_sdk", reason="needs the servos' SDK: pip install 'vla-rl[lerobot]'")

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOW, HIGH = 1024, 3072
STEPS = 4095 / 360  # of the encoder, a degree


@pytest.fixture
def bus() -> Iterator[FeetechBus]:
    line = FeetechBus(low=LOW, high=HIGH)
    yield line
    line.unplug()


def calibrate(folder: Path, name: str, low: int = LOW) -> None:
    """As lerobot-calibrate writes it."""
    joints = {
        joint: {"id": i, "drive_mode": 0, "homing_offset": 0, "range_min": low, "range_max": HIGH}
        for i, joint in enumerate(JOINTS, 1)
    }
    (folder / f"{name}.json").write_text(json.dumps(joints))


def so101(bus: FeetechBus, folder: Path) -> RobotContract:
    overrides = (f"transport.port={bus.port}", f"transport.settings.calibration_dir={folder}")
    values = load_contract("so101", overrides).model_dump()
    values["transport"]["cameras"], values["observation"]["images"] = {}, {}
    return RobotContract.model_validate(values)


def test_positions_and_goals_in_degrees_and_percent(bus: FeetechBus, tmp_path: Path) -> None:
    calibrate(tmp_path, "my_follower")
    contract = so101(bus, tmp_path)
    bus.place(1, 2048 + round(30 * STEPS))
    bus.place(6, LOW + (HIGH - LOW) // 4)
    with closing(contract.transport.open()) as transport:
        robot = TopicRobot(contract, transport)
        seen = until(robot.read, "an observation", 20)
        assert seen.state == pytest.approx([30, 0, 0, 0, 0, 25], abs=0.1)
        robot.send(np.array([25, 5, -5, 0, 10, 30], np.float32))
        until(lambda: bus.goals, "goals", 20)
        expected = [2048 + angle * STEPS for angle in (25, 5, -5, 0, 10)] + [LOW + 0.3 * (HIGH - LOW)]
        assert [bus.value(i, GOAL) for i in range(1, 7)] == pytest.approx(expected, abs=2)
        robot.send(np.array([80, 5, -5, 0, 10, 30], np.float32))
        until(lambda: len(bus.goals) > 1, "goals", 20)
        assert bus.goals[1][1] == pytest.approx(2048 + 40 * STEPS, abs=2), "max_relative_target: 15 from 25"
        assert bus.torque == [1] * 6
    assert bus.torque == [0] * 6, "an SO arm's motors are off after the end"


def test_servos_that_fall_silent_are_a_fault(bus: FeetechBus, tmp_path: Path) -> None:
    calibrate(tmp_path, "my_follower")
    contract = so101(bus, tmp_path)
    with closing(contract.transport.open()) as transport:
        robot = TopicRobot(contract, transport)
        until(robot.read, "an observation", 20)
        bus.answers = False
        until(lambda: robot.read() is None, "no observation", 20)
        assert "no status packet" in until(lambda: robot.fault, "the fault", 20)
        bus.answers = True
        until(lambda: robot.fault is None and robot.read(), "an observation again", 20)


@pytest.mark.parametrize("calibrated", ["never", "otherwise"])
def test_an_arm_that_is_not_calibrated_is_refused(bus: FeetechBus, tmp_path: Path, calibrated: str) -> None:
    if calibrated == "otherwise":
        calibrate(tmp_path, "my_follower", low=LOW + 1)
    with pytest.raises(TransportError, match=r"not calibrated.*lerobot-calibrate --robot.type=so101_follower"):
        so101(bus, tmp_path).transport.open()
    assert bus.torque == [0] * 6


def test_an_arm_that_is_not_there_is_told(bus: FeetechBus, tmp_path: Path) -> None:
    contract = so101(bus, tmp_path)
    values = contract.transport.model_copy(update={"port": str(tmp_path / "ttyACM0")})
    with pytest.raises(TransportError, match="so101_follower: cannot connect: Could not connect on port"):
        values.open()
