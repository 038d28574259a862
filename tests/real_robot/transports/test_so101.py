"""LeRobot's SO-101 classes, with the servos' SDK, on a serial line of simulated servos, by the shipped contract."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml
from feetech_bus import GOAL, FeetechBus
from processes import ROOT, Child, json_lines, until

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.operator.devices import LeaderArm, device_overrides, open_device
from real_robot.transports.base import TransportError
from real_robot.transports.lerobot_devices import DeviceError

pytest.importorskip("scservo_sdk", reason="needs the servos' SDK: pip install '.[lerobot]'")

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


def patiently[T](connect: Callable[[], T]) -> T:
    """Connect. Feetech's SDK gives a servo 50 ms to answer, more than a busy machine may leave simulated ones."""
    for _ in range(20):
        try:
            return connect()
        except (TransportError, DeviceError) as error:
            if "motor check failed" not in str(error) and "status packet" not in str(error):
                raise
            time.sleep(0.5)
    return connect()


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
    with closing(patiently(contract.transport.open)) as transport:
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
    with closing(patiently(contract.transport.open)) as transport:
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
        patiently(so101(bus, tmp_path).transport.open)
    assert bus.torque == [0] * 6


def test_an_arm_that_is_not_there_is_told(bus: FeetechBus, tmp_path: Path) -> None:
    contract = so101(bus, tmp_path)
    values = contract.transport.model_copy(update={"port": str(tmp_path / "ttyACM0")})
    with pytest.raises(TransportError, match="so101_follower: cannot connect: Could not connect on port"):
        values.open()


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deploy_drives_the_arm_within_its_limits_and_leaves_it_off(bus: FeetechBus, tmp_path: Path) -> None:
    """`vla-rl deploy` and a policy server in processes of their own; the servos are here."""
    calibrate(tmp_path, "my_follower")
    values = yaml.safe_load(shipped_contracts()["so101"].read_text())
    values["transport"] |= {"port": bus.port, "cameras": {}}
    values["transport"]["settings"]["calibration_dir"] = str(tmp_path)
    values["observation"].pop("images")
    # Patient, for a busy machine.
    values |= {"rate": 10, "silence": 60}
    values["transport"] |= {"read_hz": 10, "patience": 4, "max_command_age": 4}
    values["observation"]["max_age"] = values["safety"]["observation_timeout"] = values["safety"]["command_timeout"] = 3
    robot = tmp_path / "arm.yaml"
    robot.write_text(yaml.safe_dump(values))
    log = tmp_path / "ticks.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    server = [sys.executable, str(Path(__file__).parent.with_name("light_server.py")), str(port), "joints"]
    command = [
        sys.executable,
        "-m",
        "vla_rl",
        "deploy",
        str(robot),
        "--server",
        f"127.0.0.1:{port}",
        "--instruction",
        "sway",
    ]
    children = [Child(server, tmp_path / "server.log", env)]
    try:
        children.append(Child([*command, "--log", str(log)], tmp_path / "deploy.log", env))
        deploy = children[-1]
        until(lambda: deploy.says("waiting for"), "deploy", 300)
        assert bus.torque == [1] * 6
        deploy.type("\n")
        until(lambda: log.exists() and any(line["mode"] == "running" for line in json_lines(log)[-5:]), "motion")
        until(lambda: np.ptp([goals[1] for goals in bus.goals]) > 10 * STEPS, "the sway")
        bus.answers = False
        until(lambda: deploy.says("no status packet"), "the stop")
        quiet = len(bus.goals)
        bus.answers = True
        until(lambda: len(bus.goals) > quiet, "the hold is sent again")
        deploy.type("r\n")
        until(lambda: deploy.says("keyboard resets after"), "the reset")
        deploy.type("q")
        assert deploy.process.wait(60) == 0
    finally:
        for child in children:
            child.kill()
    lines = json_lines(log)
    assert {"running", "holding", "stopped"} <= {line["mode"] for line in lines}
    sent = np.array([line["sent"] for line in lines if line["sent"]])
    assert np.abs(np.diff(sent[:, 0])).max() <= 60 / 10 + 1e-3 and np.ptp(sent[:, 0]) > 10, "60 degrees a second"
    pans = np.array([goals[1] for goals in bus.goals])
    assert np.abs(np.diff(pans)).max() <= 15 * STEPS + 2, "LeRobot's own limit, whatever the bus left out"
    assert pans.max() <= 2048 + 110 * STEPS + 1
    assert bus.torque == [0] * 6


def test_lerobots_leader_gives_targets_in_the_contracts_units(bus: FeetechBus, tmp_path: Path) -> None:
    calibrate(tmp_path, "my_leader")
    overrides = (
        *device_overrides("lerobot:so101_leader"),
        f"teleop.device.port={bus.port}",
        "teleop.device.id=my_leader",
        f"teleop.device.settings.calibration_dir={tmp_path}",
    )
    contract = load_contract("so101", overrides)
    bus.place(3, 2048 - round(40 * STEPS))
    assert contract.teleop.device is not None
    device = contract.teleop.device
    leader = patiently(lambda: open_device(device, contract, ()))
    assert isinstance(leader, LeaderArm)
    with closing(leader):
        target, _ = until(leader.target, "a target", 20)
        assert target == pytest.approx([0, 0, -40, 0, 0, 50], abs=0.1)
        assert bus.torque == [0] * 6, "a hand moves it"
        bus.answers = False
        until(lambda: "no status packet" in leader.error, "the silence", 20)
        bus.answers = True
