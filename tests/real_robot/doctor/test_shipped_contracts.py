"""Shipped contracts against their drivers' graphs, as the drivers' sources have them, and the makers' limits."""

from __future__ import annotations

import numpy as np
import pytest
import yaml
from patients import examine
from processes import ROOT
from virtual_time import VirtualTime

from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.doctor.listen import Findings, Heard
from real_robot.doctor.robot_check import check_robot, judge
from real_robot.doctor.topics import check_source
from real_robot.transports.messages import JointState

DRIVERS = yaml.safe_load((ROOT / "tests/real_robot/driver_graphs.yaml").read_text())
PLAYED_ELSEWHERE = {
    "sim_robot": "vla-rl robot sim itself, in test_end_to_end.py",
    "so101": "LeRobot's class on simulated servos, in test_so101.py",
    "trossen_lerobot": "names alone, below: Trossen's plugin is not at hand",
}
PANDA = {
    "low": (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    "high": (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    "velocity": (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61),
    "acceleration": (15, 7.5, 10, 12.5, 15, 20, 20),
    "jerk": (7500, 3750, 5000, 6250, 7500, 10000, 10000),
}
FR3 = {
    "low": (-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159),
    "high": (2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159),
    "velocity": (2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26),
    "acceleration": (10,) * 7,
    "jerk": (5000,) * 7,
}
UR5E = {
    "low": (-6.2832, -6.2832, -3.1416, -6.2832, -6.2832, -6.2832),
    "high": (6.2832, 6.2832, 3.1416, 6.2832, 6.2832, 6.2832),
    "velocity": (3.1416,) * 6,
}
WXAI = {
    "low": (-3.0543, 0, 0, -1.5708, -1.5708, -3.1416),
    "high": (3.0543, 3.1416, 2.3562, 1.5708, 1.5708, 3.1416),
    "velocity": (3.375, 3.375, 3.375, 7, 7, 7),
    "acceleration": (3.1416,) * 6,
}
VX300S = {
    "low": (-3.1416, -1.8501, -1.7628, -3.1416, -1.8676, -3.1416),
    "high": (3.1416, 1.2567, 1.6058, 3.1416, 2.2341, 3.1416),
    "velocity": (3.1416,) * 6,
}
MAKERS = {
    "aloha": VX300S,
    "franka_ros1": PANDA,
    "franka_ros2": FR3,
    "ur5e_ros1": UR5E,
    "ur5e_ros2": UR5E,
    "trossen_ros2": WXAI,
}


def test_every_shipped_contract_is_played_somewhere() -> None:
    assert set(shipped_contracts()) == set(DRIVERS) | set(PLAYED_ELSEWHERE)


@pytest.mark.parametrize("name", DRIVERS)
def test_on_its_drivers_graph_it_has_no_fault(name: str, virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what nobody there can have: the test's stop button; and a camera of 4:3 is squeezed."""
    found = examine(virtual, monkeypatch, name, DRIVERS[name])
    assert all(line.startswith("operator.") or line.endswith(": picture") for line in found), found
    assert all(check.status == "warning" for check in found.values()), found


@pytest.mark.parametrize("name", MAKERS)
def test_its_limits_are_within_the_makers(name: str) -> None:
    maker = MAKERS[name]
    arm = load_contract(name).safety.dimensions[: len(maker["low"])]
    for number, limits in enumerate(arm):
        assert maker["low"][number] <= limits.low < limits.high <= maker["high"][number], limits.name
        assert limits.max_velocity is not None and limits.max_velocity <= maker["velocity"][number] / 2
        assert limits.max_acceleration is not None and limits.stop_acceleration is not None
        assert limits.stop_acceleration <= maker.get("acceleration", (4.0,) * 7)[number]
        assert limits.stop_jerk is not None and limits.stop_jerk <= maker.get("jerk", (100.0,) * 7)[number]


def test_trossens_names_in_lerobot_are_understood() -> None:
    contract = load_contract("trossen_lerobot", ["transport.modules=[widowx_stand_in]"])
    wrong = [check for check in check_robot(contract) if check.is_fault]
    assert not wrong, wrong


def test_a_late_stream_is_put_down_to_an_overloaded_machine_where_it_is_one() -> None:
    contract = load_contract("aloha")
    source = contract.observation.state[0]
    zeros = np.zeros(len(source.joints))
    newest = JointState(name=source.joints, position=zeros, velocity=zeros, effort=zeros)
    heard = Heard(times=[(0.05 * i, 0.0) for i in range(40)], newest=newest)
    fixes = []
    for load in (0.9, 6.5):
        findings = Findings({source.topic: heard}, 0.2, None, None, {}, {}, None, {}, load)
        slow, *_ = check_source("observation.state[0]", source, source.topic, findings)
        (whole,) = (c for c in judge(contract, findings) if c.name == "observation")
        assert (slow.status, whole.status) == ("wrong", "wrong"), "late is late, whoever's fault it is"
        fixes.append([slow.fix, whole.fix])
    assert not any("overloaded" in fix for fix in fixes[0])
    assert all("this machine is overloaded (6.5 programs a processor)" in fix for fix in fixes[1])
