"""A transport that the package does not know, in one file, through `kind: "module:Class"` alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from memory_transport import GRAPHS, MemoryConfig, MemoryTransport

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.transports.base import QosConfig, TransportConfig
from real_robot.transports.configs import Ros2Config
from real_robot.transports.lerobot import LeRobotConfig
from real_robot.transports.messages import Bool, Float64MultiArray, JointState
from real_robot.transports.ros1 import Ros1Config
from vla_rl.config import KINDS, Config, ConfigError, build_component, validate

CONTRACT = """
name: two_joints
transport: {kind: "memory_transport:MemoryConfig", graph: own}
observation:
  state: [{topic: /state, type: std_msgs/Float64MultiArray, size: 2, align: {timeline: receive}}]
action:
  - {topic: /goal, type: sensor_msgs/JointState, joints: [a, b], indices: [0, 1]}
safety:
  dimensions:
    - {name: a, kind: position, low: -1, high: 1, max_velocity: 1, start: 0}
    - {name: b, kind: position, low: -1, high: 1, max_velocity: 1, start: 0}
execution: {kind: position}
"""


class NotATransport(Config):
    """A config, but of nothing that has topics."""

    kind: str = ""


@pytest.fixture
def contract(tmp_path: Path) -> RobotContract:
    path = tmp_path / "two_joints.yaml"
    path.write_text(CONTRACT)
    return load_contract(path)


def test_observations_come_and_actions_go_through_it(contract: RobotContract) -> None:
    transport = contract.transport.open()
    assert transport is GRAPHS["own"] and isinstance(transport, MemoryTransport)
    robot = TopicRobot(contract, transport, "reach")
    assert robot.read() is None and robot.missing() == ["/state"]
    transport.deliver("/state", Float64MultiArray(data=np.array([0.25, -0.5])))
    seen = robot.read()
    assert seen is not None and seen.state.tolist() == [0.25, -0.5] and seen.instruction == "reach"
    robot.send(np.array([0.5, 0.125], np.float32))
    (sent,) = transport.sent["/goal"]
    assert isinstance(sent, JointState) and sent.name == ("a", "b") and sent.position.tolist() == [0.5, 0.125]
    assert robot.fault is None and robot.unheard() == []
    transport.fault, transport.unreadable = "unplugged", {"/state": 3}
    assert robot.fault == "unplugged" and robot.dropped == {"/state": {"unreadable": 3}}
    robot.close()
    assert transport.closed


def test_its_options_are_checked_and_kept_by_a_copy_of_the_contract(contract: RobotContract, tmp_path: Path) -> None:
    assert isinstance(contract.transport, MemoryConfig) and contract.transport.graph == "own"
    assert validate(RobotContract, contract.model_dump(mode="json")) == contract
    with pytest.raises(ConfigError, match=r"transport\.grap: unknown key .*Did you mean 'graph'"):
        load_contract(tmp_path / "two_joints.yaml", ["transport.grap=x"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rosbrigde", r"transport\.kind: got 'rosbrigde', allowed: .*Did you mean 'rosbridge'"),
        ("no_such_module:Config", r"transport\.kind: .*cannot be imported"),
        ("memory_transport:MemoryTransport", r"transport\.kind: .*must be a class that extends .*TransportConfig"),
        ("test_own_transport:NotATransport", r"transport.*TransportConfig"),
    ],
)
def test_a_kind_that_is_no_transport_is_refused_by_name(tmp_path: Path, kind: str, message: str) -> None:
    values = yaml.safe_load(CONTRACT) | {"transport": {"kind": kind}}
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        load_contract(tmp_path / "robot.yaml")


def test_the_shipped_kinds_and_their_options_are_the_same_as_ever() -> None:
    assert set(KINDS["transport"]) == {"ros1", "ros2", "rclpy", "rosbridge", "lerobot"}
    kinds = {name: type(load_contract(name).transport) for name in shipped_contracts()}
    assert {kinds[n] for n in ("sim_robot", "franka_ros1", "ur5e_ros1")} == {Ros1Config}
    assert {kinds[n] for n in ("franka_servo", "franka_ros2", "ur5e_ros2", "trossen_ros2")} == {Ros2Config}
    assert {kinds[n] for n in ("so101", "trossen_lerobot")} == {LeRobotConfig}
    assert build_component("transport", {"kind": "rosbridge", "url": "ws://robot:9090", "ros": 2})
    with pytest.raises(ConfigError, match=r"transport\.domain: got 500"):
        load_contract("franka_servo", ["transport.domain=500"])
    with pytest.raises(ConfigError, match=r"transport\.mastr: unknown key .*Did you mean 'master'"):
        load_contract("sim_robot", ["transport.mastr=x"])


def test_a_config_without_open_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="Bare is a transport's config and needs a method open"):
        type("Bare", (TransportConfig,), {})(kind="x").open()


def test_the_transport_delivers_to_whoever_subscribed_in_time() -> None:
    transport, got = MemoryTransport(), []
    transport.subscribe("/stop", Bool, QosConfig(), got.append)
    transport.advertise("/stop", Bool, QosConfig())(Bool(data=True))
    assert got == [Bool(data=True)]
