"""Cameras without ROS: LeRobot's OpenCV class on a real stream, next to a robot's topics; frozen, unplugged."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from memory_transport import MemoryTransport
from network_camera import NetworkCamera
from processes import until
from virtual_time import VirtualTime

from real_robot.bridge import cameras
from real_robot.bridge.cameras import LocalCamera
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.channels import CameraConfig
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.doctor.robot_check import check_robot
from real_robot.transports.base import TransportError
from real_robot.transports.messages import Image, JointState
from vla_rl.config import ConfigError


@pytest.fixture(scope="module")
def stream() -> Iterator[NetworkCamera]:
    logging.getLogger("lerobot").setLevel(logging.ERROR)
    camera = NetworkCamera()
    yield camera
    camera.unplug()


def contract_of(tmp_path: Path, **camera: Any) -> RobotContract:
    """An arm behind topics, with a camera of this machine."""
    values = {
        "name": "arm",
        "rate": 20,
        "transport": {"kind": "memory_transport:MemoryConfig", "graph": str(tmp_path)},
        "observation": {
            "max_age": 0.3,
            "images": {"front": {"camera": camera, "size": [60, 80], "align": {"tolerance": 0.3}}},
            "state": [
                {"topic": "/joints", "type": "sensor_msgs/JointState", "joints": ["a"], "align": {"strategy": "hold"}}
            ],
        },
        "action": [{"topic": "/command", "type": "std_msgs/Float64MultiArray", "indices": [0]}],
        "execution": {"kind": "position"},
        "safety": {
            "observation_timeout": 0.3,
            "dimensions": [{"name": "a", "kind": "position", "state": 0, "low": -1, "high": 1, "max_velocity": 1}],
        },
    }
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_contract(path)


def say_where(transport: MemoryTransport) -> None:
    message = JointState(
        stamp=time.time_ns(), name=("a",), position=np.zeros(1), velocity=np.zeros(0), effort=np.zeros(0)
    )
    transport.deliver("/joints", message)


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory, stream: NetworkCamera) -> Iterator[TopicRobot]:
    contract = contract_of(tmp_path_factory.mktemp("arm"), kind="opencv", index=stream.url, patience=0.5)
    transport = contract.transport.open()
    assert isinstance(transport, MemoryTransport)
    robot = TopicRobot(contract, transport, "go")
    say_where(transport)
    yield robot
    robot.close()


@pytest.mark.live
def test_a_camera_and_an_arms_topics_make_an_observation(robot: TopicRobot) -> None:
    observation = until(robot.read, "an observation", 20)
    picture = observation.images["front"]
    assert picture.shape == (60, 80, 3)
    assert picture[30, 5, 0] < 40 and picture[30, 75, 0] > 200 and picture[..., 2].max() < 40, "RGB, upright"
    assert observation.state.tolist() == [0.0] and robot.fault is None


@pytest.mark.live
def test_a_camera_that_freezes_holds_the_robot_then_is_a_fault(robot: TopicRobot, stream: NetworkCamera) -> None:
    until(robot.read, "an observation", 20)
    stream.frozen.set()
    until(lambda: robot.read() is None, "no observation", 10)
    assert "front" in robot.missing()
    assert "no frame comes" in until(lambda: robot.fault, "a fault", 10)
    stream.frozen.clear()
    until(robot.read, "an observation again", 20)
    assert robot.fault is None


@pytest.mark.live
def test_pictures_are_as_old_as_their_frames(robot: TopicRobot, stream: NetworkCamera) -> None:
    """The last picture of a frozen camera is given for as long as max_age, not longer."""
    until(robot.read, "an observation", 20)
    stream.frozen.set()
    last = None
    while (observation := robot.read()) is not None:
        last = observation
        time.sleep(0.005)
    assert last is not None and time.monotonic() - last.stamp < 0.3 + 0.15
    stream.frozen.clear()


@pytest.mark.live
def test_an_unplugged_camera_is_opened_again_when_it_is_back(
    robot: TopicRobot, stream: NetworkCamera, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cameras, "_AGAIN", 0.1)
    until(robot.read, "an observation", 20)
    stream.unplug()
    until(lambda: robot.read() is None, "no observation", 10)
    assert "camera front (opencv http" in until(lambda: robot.fault, "a fault", 10)
    stream.plug_in()
    until(robot.read, "an observation again", 60)
    assert robot.fault is None


def test_a_camera_that_is_not_there_is_named() -> None:
    config = CameraConfig(kind="opencv", index="/dev/video97")
    with pytest.raises(
        TransportError, match=r"camera front \(opencv /dev/video97\): cannot be opened: .*lerobot-find-cam"
    ):
        LocalCamera("front", config, lambda message: None)


@pytest.mark.live
def test_the_doctor_says_how_the_camera_does(tmp_path: Path, stream: NetworkCamera) -> None:
    contract = contract_of(tmp_path, kind="opencv", index=stream.url)
    found = {c.name: c for c in check_robot(contract, 0.5)}
    assert found["camera front"].status == "ok", found["camera front"]
    assert "120 x 160" in found["camera front: picture"].found
    assert found["/joints"].status == "wrong", "that one says nothing"


def test_the_doctor_names_a_camera_that_is_not_there(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    virtual.install(monkeypatch, "real_robot")
    found = {c.name: c for c in check_robot(contract_of(tmp_path, kind="opencv", index="/dev/video97"), 1.0)}
    assert found["camera front"].status == "wrong" and "/dev/video97" in found["camera front"].found
    assert "plug it in" in found["camera front"].fix


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({}, "each has a `topic` or a `camera`"),
        ({"topic": "/a", "camera": {"kind": "opencv"}}, "each has a `topic` or a `camera`"),
        ({"camera": {"kind": "realsense"}}, "`serial` belongs to kind realsense"),
        ({"camera": {"kind": "opencv", "width": 640}}, "width and height: both or none"),
        ({"camera": {"kind": "webcam"}}, "kind"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, image: dict[str, Any], message: str) -> None:
    contract_of(tmp_path, kind="opencv")
    values = yaml.safe_load((tmp_path / "arm.yaml").read_text())
    values["observation"]["images"]["front"] = image
    (tmp_path / "arm.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        load_contract(tmp_path / "arm.yaml")


def test_a_wrong_setting_lists_those_that_there_are() -> None:
    with pytest.raises(TransportError, match=r"camera front .*Its settings are: .*rotation"):
        LocalCamera("front", CameraConfig(kind="opencv", settings={"rotate": 90}), lambda message: None)


@pytest.mark.skipif(importlib.util.find_spec("pyrealsense2") is not None, reason="pyrealsense2 is installed")
def test_realsense_without_its_library_says_what_to_install() -> None:
    with pytest.raises(TransportError, match=r"realsense 123.*pip install 'lerobot\[intelrealsense\]'"):
        LocalCamera("wrist", CameraConfig(kind="realsense", serial="123"), lambda message: None)


def test_a_realsense_gives_frames() -> None:
    library = pytest.importorskip("pyrealsense2", reason="pyrealsense2 is not installed")
    devices = list(library.context().query_devices())
    if not devices:
        pytest.skip("no RealSense camera is plugged in")
    serial, got = devices[0].get_info(library.camera_info.serial_number), []
    camera = LocalCamera("wrist", CameraConfig(kind="realsense", serial=serial), got.append)
    until(lambda: len(got) > 10, "ten frames", 20)
    camera.close()
    assert isinstance(got[0], Image)
