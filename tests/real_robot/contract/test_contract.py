"""Contracts: those that ship load, and a wrong one is told which field is wrong and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from real_robot.contract.channels import CameraConfig, ObservationConfig
from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.contract.sections import TeleopConfig
from real_robot.operator.hub.hub_server import HubFile
from real_robot.serving.server import ServeConfig
from vla_rl.config import Config, ConfigError, apply_overrides, validate


@pytest.mark.parametrize("name", sorted(shipped_contracts()))
def test_shipped_contracts_load(name: str) -> None:
    contract = load_contract(name)
    assert contract.name == name and len(contract.safety.dimensions) == contract.action_dim
    assert contract.safety.control_hz == contract.execution.control_hz == contract.rate


def test_the_rate_reaches_every_section() -> None:
    contract = load_contract("sim_robot", ["rate=5"])
    assert contract.safety.control_hz == contract.execution.control_hz == 5


def test_servo_commands_come_within_its_time_out() -> None:
    assert 1 / load_contract("franka_servo").rate < 0.1


def changed(tmp_path: Path, *overrides: str, **sections: Any) -> Path:
    values = apply_overrides(yaml.safe_load(shipped_contracts()["sim_robot"].read_text()), overrides) | sections
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


STATE = {"topic": "/j", "type": "sensor_msgs/JointState"}
GRIPPER = {"topic": "/g", "type": "control_msgs/GripperCommand"}
TWIST = {"topic": "/t", "type": "geometry_msgs/TwistStamped"}
TURNED = {"kind": "position", "low": -1, "high": 1, "max_velocity": 1, "start": 0}
POSE = {
    "rate": 10,
    "pace": "clock",
    "observation": {"state": [{"topic": "/p", "type": "geometry_msgs/PoseStamped", "convert": {"scale": 1000}}]},
    "action": [{"topic": "/c", "type": "geometry_msgs/PoseStamped", "indices": [0, 1, 2, 3, 4, 5]}],
    "execution": {},
    "safety": {
        "dimensions": [TURNED | {"name": name} for name in "abcdef"],
        "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [0, 0, 0], "high": [0.5, 0.5, 0.5]},
    },
}


@pytest.mark.parametrize(
    ("overrides", "sections", "message"),
    [
        (["rat=5"], {}, "rat: unknown key.*Did you mean 'rate'"),
        (["rate=0"], {}, "rate: got 0"),
        (["transport.kind=ros3"], {}, "transport.*ros3"),
        (["observation.reference=wrist"], {}, "observation.reference: got 'wrist', allowed: agentview, "),
        (["observation.reference="], {}, "needs observation.reference|observation.reference: got None"),
        (["safety.control_hz=10"], {}, r"safety.control_hz: 10, but rate is 20"),
        ([], {"observation": {"state": [STATE]}}, "/j: `joints` belongs to sensor_msgs/JointState, and is required"),
        ([], {"observation": {"state": [STATE | {"joints": ["a", "a"]}]}}, "names one twice"),
        (
            [],
            {"observation": {"state": [STATE | {"joints": ["a"], "convert": {"scale": [1, 2]}}]}},
            "/j: convert.scale: one number, or 1; got 2",
        ),
        (
            [],
            {"observation": {"state": [{"topic": "/f", "type": "std_msgs/Float64MultiArray"}]}},
            "/f: std_msgs/Float64MultiArray has no header; set align.timeline: receive",
        ),
        ([], {"observation": {}}, "at least one camera or state topic"),
        ([], {"action": [TWIST | {"indices": [0, 1, 2]}]}, r"/t: indices: .* needs 6 of 0 or more, got \[0, 1, 2\]"),
        (
            [],
            {"action": [TWIST | {"indices": [0, 1, 2, 3, 4, 5], "goal": {"max_effort": 1}}]},
            "/t: `goal` belongs to actions and services; geometry_msgs/TwistStamped is a topic's message",
        ),
        ([], {"action": [GRIPPER | {"indices": [0, 1]}]}, "/g: indices: .*GripperCommand needs 1 of 0 or more"),
        (
            [],
            {
                "action": [
                    {**GRIPPER, "type": "control_msgs/ParallelGripperCommand", "indices": [0, 1], "joints": ["a", "b"]}
                ]
            },
            "/g: joints: .* moves one joint, got",
        ),
        ([], {"action": [GRIPPER | {"indices": [0], "joints": ["a"]}]}, "`joints` belongs to joint messages"),
        ([], {"action": [TWIST | {"indices": [0, 1, 2, 3, 4, 6]}]}, "together they must be 0, 1, 2"),
        ([], {"action": [TWIST | {"indices": [0, 1, 2, 3, 4, 5]}]}, "safety.dimensions: 7 entries for 6 numbers"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, overrides: list[str], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_contract(changed(tmp_path, *overrides, **sections))


def dimension(number: int, **changes: Any) -> dict[str, Any]:
    """The section `safety` of the simulated robot, with changes to one of its numbers."""
    safety = yaml.safe_load(shipped_contracts()["sim_robot"].read_text())["safety"]
    dimensions = safety["dimensions"]
    return safety | {"dimensions": [*dimensions[:number], changes, *dimensions[number + 1 :]]}


@pytest.mark.parametrize(
    ("overrides", "sections", "message"),
    [
        (
            [],
            {"safety": dimension(3, name="turn_x", **TURNED)},
            r"turn_x: kind position, but /twist_command .* takes it for a velocity: .* would go on at its last speed",
        ),
        (
            [],
            {"action": [TWIST | {"indices": [0, 1, 2, 3, 4, 5]}, GRIPPER | {"indices": [6]}]}
            | {"safety": dimension(6, name="gripper", kind="velocity", low=-1, high=1)},
            r"gripper: kind velocity, but /g .* takes it for a position: .* would be sent to 0",
        ),
        (
            [],
            {
                "action": [
                    TWIST | {"indices": [0, 1, 2, 3, 4, 5], "convert": {"offset": 0.1}},
                    GRIPPER | {"indices": [6]},
                ]
            },
            r"/t: convert.offset: 0.1 for x, a velocity: a robot that is to hold, at 0, would be told to",
        ),
        (
            [],
            {
                "action": [
                    TWIST | {"indices": [1, 0, 2, 3, 4, 5], "convert": {"scale": [-1, 1, 1, 1, 1, 1]}},
                    GRIPPER | {"indices": [6]},
                ]
            },
            r"workspace.commands: y is sent with convert.scale -1",
        ),
        (
            [],
            {
                "action": [
                    TWIST | {"indices": [0, 1, 2, 3, 4, 5], "frame": "tool0"},
                    GRIPPER | {"indices": [6]},
                ]
            },
            r"commands: x is sent in the frame 'tool0' \(/t\), and measured in 'table' \(/end_effector_pose\)",
        ),
        (["safety.workspace.state=[0, 1, 8]"], {}, r"workspace.state: 8; observation.state has the numbers 0 to 7"),
        (["safety.workspace.state=[-1, 1, 2]"], {}, r"workspace.state: -1; observation.state has the numbers 0 to 7"),
        (["execution.unblended=[7]"], {}, r"execution.unblended: 7; the action has the numbers 0 to 6"),
        ([], POSE, r"commands: a is sent with convert 1 \* x \+ 0, and measured with 1000 \* x \+ 0: .* the same unit"),
    ],
)
def test_limits_that_would_not_hold_the_robot_are_refused(
    tmp_path: Path, overrides: list[str], sections: dict[str, Any], message: str
) -> None:
    """A hold that is no standstill, a box on the wrong side or in another unit, a number that is not there."""
    with pytest.raises(ConfigError, match=message):
        load_contract(changed(tmp_path, *overrides, **sections))


@pytest.mark.parametrize(
    "option",
    [
        *(f"safety.{name}_timeout" for name in ("observation", "command", "deadman")),
        *("safety.checks.stop_after", "safety.checks.following_lag"),
        *("safety.checks.jump_speed", "safety.checks.frozen_after", "guard.timeout", "operator.stop_timeout"),
        *("silence", "pace_timeout", "observation.max_age", "observation.images.agentview.align.tolerance"),
        *("execution.max_age", "failure.patience"),
    ],
)
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_time_out_that_never_comes_is_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: got {value[1:]}\. Input should be"):
        load_contract("sim_robot", [f"{option}={value}"])


@pytest.mark.parametrize("option", ["max_command_age", "resume_within", "patience"])
def test_a_bus_has_finite_times(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"transport\.{option}: got inf\. Input should be a finite number"):
        load_contract("so101", [f"transport.{option}=.inf"])


@pytest.mark.parametrize(
    ("section", "option"),
    [
        (ServeConfig, "hang_after"),
        (ServeConfig, "temperature"),
        (HubFile, "head_start"),
        (TeleopConfig, "gripper_open"),
    ],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_servers_and_devices_have_finite_numbers(section: type[Config], option: str, value: float) -> None:
    given = {"robots": {"left": {"url": "ws://bench:8080"}}} if section is HubFile else {}
    with pytest.raises(ConfigError, match=rf"{option}: got {value}\. Input should be"):
        validate(section, {option: value, **given})


@pytest.mark.parametrize("part", ["scale", "offset"])
def test_a_conversion_is_finite(tmp_path: Path, part: str) -> None:
    twist = TWIST | {"indices": [0, 1, 2, 3, 4, 5], "convert": {part: float("nan")}}
    with pytest.raises(ConfigError, match=rf"action\.0\.convert\.{part}.*: got nan\. Input should be a finite number"):
        load_contract(changed(tmp_path, action=[twist, GRIPPER | {"indices": [6]}]))


def test_a_camera_of_this_machine_is_named_by_number_or_url_and_a_realsense_by_its_serial() -> None:
    assert CameraConfig(kind="opencv", index=2).make().index_or_path == 2
    assert CameraConfig(kind="opencv", index="rtsp://10.0.0.7/1").make().index_or_path == "rtsp://10.0.0.7/1"
    for values in ({"kind": "realsense"}, {"kind": "opencv", "serial": "123"}):
        with pytest.raises(ConfigError, match=rf"`serial` belongs to kind realsense.*kind is {values['kind']}"):
            validate(CameraConfig, values)


def test_numbers_of_the_state_are_named_by_their_topic_where_two_have_the_name() -> None:
    state = [STATE | {"joints": ("a", "b")}, STATE | {"topic": "/left/j", "joints": ("b", "c")}]
    assert validate(ObservationConfig, {"state": state}).state_names == ("a", "j.b", "left.j.b", "c")


def test_an_unknown_name_lists_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'sim_robot'.*Shipped: .*franka_servo, sim_robot"):
        load_contract("simrobot")
