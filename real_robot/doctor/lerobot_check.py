"""A robot of LeRobot's looked at from outside: connecting would turn its motors on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_robot.contract.contract import RobotContract
from real_robot.doctor.topics import near
from real_robot.transports.configs import LeRobotConfig
from real_robot.transports.lerobot import ACTION, OBSERVATION, device_values
from real_robot.transports.lerobot_devices import DeviceError, camera_names, make_device, number_names
from vla_rl.common.checks import Check


def check_unconnected(contract: RobotContract, transport: LeRobotConfig) -> list[Check]:
    """Settings, names of joints and cameras, port, calibration: all that can be known without connecting."""
    try:
        device = make_device("robots", transport.robot, device_values(transport), transport.modules)
    except DeviceError as error:
        return [Check("transport", "wrong", str(error), "mend the transport section")]
    checks = [Check("transport", "ok", f"lerobot: {transport.robot}, its settings are understood")]
    if transport.port:
        checks.append(_check_port(transport.port))
    checks.append(_check_calibration(device, transport))
    numbers = {
        OBSERVATION: number_names(device.observation_features),
        ACTION: number_names(device.action_features),
    }
    for part in (*contract.observation.state, *contract.action):
        checks.append(_check_names(part.topic, part.joints, numbers))
    cameras = camera_names(device.observation_features)
    for source in contract.observation.images.values():
        if source.camera is not None:
            continue  # of this machine, not the robot's: looked at with --connect
        known = source.topic in cameras
        found = "a camera of the robot's" if known else f"the robot has no such camera{near(source.topic, cameras)}"
        fix = "" if known else f"one of: {', '.join(cameras)}"
        checks.append(Check(source.topic, "ok" if known else "wrong", found, fix))
    fix = "with the arm at rest, look again with --connect"
    return [*checks, Check("live", "warning", "not connected: LeRobot turns the motors on then", fix)]


def _check_port(port: str) -> Check:
    if Path(port).exists():
        return Check("transport.port", "ok", port)
    return Check("transport.port", "wrong", f"{port} is not there", "plug it in, or find it: lerobot-find-port")


def _check_calibration(device: Any, transport: LeRobotConfig) -> Check:
    path = Path(device.calibration_fpath)
    if path.is_file():
        return Check("calibration", "ok", str(path))
    robot = f"--robot.type={transport.robot} --robot.port={transport.port} --robot.id={transport.id}"
    fix = f"where this robot has one: lerobot-calibrate {robot}"
    return Check("calibration", "warning", f"none: {path} is not there", fix)


def _check_names(topic: str, joints: tuple[str, ...], numbers: Mapping[str, tuple[str, ...]]) -> Check:
    known = numbers.get(topic)
    if known is None:
        return Check(topic, "wrong", f"no such topic; there are: {', '.join(numbers)}", "mend the contract")
    wrong = [name for name in joints if name not in known]
    left_out = [name for name in known if name not in joints] if topic == ACTION else []
    if wrong:
        return Check(topic, "wrong", f"no {wrong[0]!r}{near(wrong[0], known)}", f"one of: {', '.join(known)}")
    if left_out:
        return Check(topic, "wrong", f"{left_out[0]!r} is left out", "an action names all of the robot's joints")
    return Check(topic, "ok", f"{len(joints)} of {len(known)} numbers")
