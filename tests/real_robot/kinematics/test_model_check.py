"""The supervisor with the robot's model: what would collide, pass a limit or meet a singularity is not sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_transport import MemoryTransport
from urdfs import PLANAR, joint_contract, seven_joints
from virtual_time import VirtualTime

from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.control.supervisor import HOLDING, RUNNING, STOPPED, SentCommand, Supervisor
from real_robot.kinematics.check import ModelCheck
from real_robot.transports.messages import JointState
from real_robot.types import Command, RobotObservation
from vla_rl.config import ConfigError

SEVEN = [f"joint{i}" for i in range(1, 8)]
WALL = {"name": "wall", "center": [0.35, 0.6, 0], "size": [2, 0.4, 1]}  # its face is at y = 0.4


class Bench:
    """A supervisor with the check, its own clock, and a robot that is where it was told, or as fast."""

    def __init__(self, contract: RobotContract, start: list[float], transport: MemoryTransport | None = None) -> None:
        self.now, self.joints = 100.0, np.array(start, np.float64)
        self.check = ModelCheck(contract, transport)
        self.velocities = [d.kind == "velocity" for d in contract.safety.dimensions]
        self.supervisor = Supervisor(
            contract.safety, clock=lambda: self.now, motion_checks=[self.check], state_checks=[self.check]
        )
        self.tick_length = 1 / contract.rate
        self.sent: SentCommand | None = None

    def tick(self, command: list[float] | np.ndarray) -> SentCommand:
        self.now += self.tick_length
        self.supervisor.observe(RobotObservation({}, self.joints.astype(np.float32), "go", self.now))
        self.sent = self.supervisor.filter(Command(np.array(command, np.float32), "policy", self.now))
        if self.sent.values is not None:
            self.move(self.sent.values.astype(np.float64))
        return self.sent

    def move(self, told: np.ndarray) -> None:
        self.joints = np.where(self.velocities, self.joints + told * self.tick_length, told)

    def nearest(self, pair: tuple[str, str]) -> float:
        return self.check.arm.distances(self.joints).get(pair, math.inf)


def planar(tmp_path: Path, **model: Any) -> RobotContract:
    path = joint_contract(tmp_path, PLANAR, ["shoulder", "elbow"], model={"boxes": [WALL], **model})
    return load_contract(path)


def test_joints_are_stopped_before_the_wall_and_may_go_back(tmp_path: Path) -> None:
    bench = Bench(planar(tmp_path), [0.0, 0.0])
    nearest = math.inf
    for _ in range(100):
        bench.tick([1.2, 0.0])
        nearest = min(nearest, bench.nearest(("lower", "wall")))
    assert 0.01 <= nearest < 0.03
    assert bench.supervisor.state.mode == HOLDING
    assert bench.supervisor.state.reason.startswith("lower would ") and "wall" in bench.supervisor.state.reason
    assert bench.sent is not None and "model" in bench.sent.limited
    for _ in range(20):
        bench.tick([0.0, 0.0])
    assert bench.supervisor.state.mode == RUNNING and bench.joints[0] < 0.5


def test_nothing_of_the_cell_is_met_at_any_speed_that_the_limits_allow(tmp_path: Path) -> None:
    """A bar of 1 cm, which the tip passes within two ticks."""
    bar = {"name": "bar", "center": [0.55, 0.3, 0], "size": [0.01, 0.01, 1]}
    path = joint_contract(
        tmp_path, PLANAR, ["shoulder", "elbow"], model={"boxes": [bar]}, rate=5, observation={"max_age": 1.0}
    )
    contract = load_contract(path, ["safety.command_timeout=1", "safety.observation_timeout=1"])
    fast = {"max_velocity": 1.5, "max_acceleration": 50.0}
    dims = tuple(d.model_copy(update=fast) for d in contract.safety.dimensions)
    bench = Bench(
        contract.model_copy(update={"safety": contract.safety.model_copy(update={"dimensions": dims})}), [0.0, 0.0]
    )
    for _ in range(15):
        bench.tick([1.2, 0.0])
    assert bench.supervisor.state.mode == HOLDING and "bar" in bench.supervisor.state.reason
    assert bench.joints[0] < math.atan2(0.3, 0.55) and bench.nearest(("bar", "lower")) >= 0.01


def test_random_commands_of_seven_joints_never_bring_links_together(tmp_path: Path) -> None:
    floor = {"name": "floor", "point": [0, 0, -0.05]}
    path = joint_contract(tmp_path, seven_joints(), SEVEN, model={"planes": [floor], "allowed": [["floor", "link1"]]})
    bench = Bench(load_contract(path), [0.0] * 7)
    generator = np.random.default_rng(0)
    nearest, refused, goal = math.inf, 0, np.zeros(7)
    for i in range(800):
        if i % 100 == 0:
            goal = np.array([generator.uniform(-1, 1), 0, 0, 0, 0, 0, 0]) + 2.5 * generator.choice([-1, 1], 7)
        refused += "model" in bench.tick(goal).limited
        nearest = min([nearest, *bench.check.arm.distances(bench.joints).values()])
    assert refused > 20, "the trial must meet something"
    assert nearest >= 0.01 - 1e-5


def test_a_robot_found_too_near_may_only_move_away(tmp_path: Path) -> None:
    start = math.asin((0.4 - 0.025) / 0.7)  # the tip's corner is nearer than 1 cm
    bench = Bench(planar(tmp_path), [start, 0.0])
    first = bench.nearest(("lower", "wall"))
    assert 0 < first < 0.01
    for _ in range(50):
        bench.tick([start + 0.5, 0.0])
        assert bench.nearest(("lower", "wall")) >= first - 0.001
    assert bench.supervisor.state.mode == HOLDING
    bench.tick([start - 0.5, 0.0])
    for _ in range(40):
        assert bench.tick([start - 0.5, 0.0]).mode == RUNNING
    assert bench.nearest(("lower", "wall")) > 0.01


def velocity_contract(tmp_path: Path, **model: Any) -> RobotContract:
    action = [{"topic": "/velocity", "type": "std_msgs/Float64MultiArray", "indices": [0, 1]}]
    dims = [{"name": n, "kind": "velocity", "low": -1, "high": 1, "max_acceleration": 4.0} for n in ("s", "e")]
    model = {"boxes": [WALL], "commands": {0: "shoulder", 1: "elbow"}, **model}
    path = joint_contract(tmp_path, PLANAR, ["shoulder", "elbow"], action=action, model=model)
    return load_contract(path, [f"safety.dimensions={dims}"])


def test_joint_velocities_end_before_the_wall(tmp_path: Path) -> None:
    bench = Bench(velocity_contract(tmp_path), [0.0, 0.0])
    for _ in range(100):
        bench.tick([1.0, 0.0])
        assert bench.nearest(("lower", "wall")) >= 0.01
    assert bench.supervisor.state.mode == HOLDING and "wall" in bench.supervisor.state.reason
    for _ in range(20):
        assert bench.tick([-1.0, 0.0]).mode == RUNNING


def test_joint_velocities_end_before_the_joint_s_limit(tmp_path: Path) -> None:
    bench = Bench(velocity_contract(tmp_path, boxes=[]), [0.0, 2.4])
    for _ in range(60):
        bench.tick([0.0, 1.0])
        assert bench.joints[1] <= 2.75 + 1e-6
    assert bench.supervisor.state.reason == "elbow would pass its limit, -2.75..2.75 is allowed"
    for _ in range(20):
        assert bench.tick([0.0, -1.0]).mode == RUNNING


def twist_contract(tmp_path: Path, **model: Any) -> RobotContract:
    action = [{"topic": "/twist", "type": "geometry_msgs/TwistStamped", "indices": list(range(6)), "frame": "link0"}]
    dims = [{"name": n, "kind": "velocity", "low": -0.5, "high": 0.5, "max_acceleration": 2.0} for n in "xyzrpw"]
    path = joint_contract(tmp_path, seven_joints(), SEVEN, action=action, model={"end_effector": "hand", **model})
    return load_contract(path, [f"safety.dimensions={dims}"])


class TwistBench(Bench):
    """The robot's own controller turns twists into joint velocities, by the pseudoinverse."""

    def move(self, told: np.ndarray) -> None:
        arm = self.check.arm
        jacobian = arm.jacobian(self.joints, arm.link("hand"))
        self.joints = self.joints + np.linalg.pinv(jacobian) @ told * self.tick_length

    def condition(self) -> float:
        return float(np.linalg.cond(self.check.arm.jacobian(self.joints, self.check.arm.link("hand"))))


BENT = [0.2, 0.6, 0.1, 1.0, 0.3, 0.9, 0.1]


def test_twists_hold_before_a_singularity_and_come_back(tmp_path: Path) -> None:
    bench = TwistBench(twist_contract(tmp_path), BENT)
    arm = bench.check.arm
    outward = arm.position(bench.joints, arm.link("hand")) - arm.position(bench.joints, arm.link("link2"))
    outward = 0.4 * outward / np.linalg.norm(outward)
    assert bench.condition() < 17
    for _ in range(200):
        bench.tick([*outward, 0, 0, 0])
        assert bench.condition() < 33
    assert bench.supervisor.state.reason == "hand would come too near to a singularity, condition above 30"
    for _ in range(20):
        assert bench.tick([*-outward, 0, 0, 0]).mode == RUNNING


def test_twists_hold_before_a_box(tmp_path: Path) -> None:
    table = {"name": "table", "center": [0.8, 0, -0.1], "size": [0.8, 2, 0.6]}  # its top is at 0.2 m
    floor = twist_contract(tmp_path, boxes=[table], max_condition=None)
    bench = TwistBench(floor, BENT)
    nearest = math.inf
    for _ in range(150):
        bench.tick([0.0, 0.0, -0.3, 0, 0, 0])
        nearest = min([nearest, *(d for pair, d in bench.check.arm.distances(bench.joints).items() if "table" in pair)])
    assert bench.supervisor.state.mode == HOLDING and "table" in bench.supervisor.state.reason
    assert 0.01 - 1e-3 <= nearest < 0.05


def joint_state(position: list[float], effort: list[float]) -> JointState:
    names = ("shoulder", "elbow")
    numbers = {"position": np.array(position), "velocity": np.zeros(0), "effort": np.array(effort)}
    return JointState(stamp=1, frame_id="", name=names, **numbers)


def effort_bench(tmp_path: Path, **model: Any) -> tuple[Bench, MemoryTransport]:
    transport = MemoryTransport()
    contract = planar(tmp_path, joint_states="/joint_states", boxes=[], **model)
    bench = Bench(contract, [0.0, 0.0], transport)
    return bench, transport


def test_an_effort_beyond_its_limit_holds_and_then_stops(tmp_path: Path) -> None:
    bench, transport = effort_bench(tmp_path, effort_share=0.5, max_effort={"elbow": 5})
    transport.deliver("/joint_states", joint_state([0, 0], [19, -4]))
    assert bench.tick([0.5, 0.5]).mode == RUNNING
    transport.deliver("/joint_states", joint_state([0, 0], [19, -6]))
    assert bench.tick([0.5, 0.5]).mode == HOLDING
    assert bench.supervisor.state.reason == "effort of elbow is -6, at most 5 is allowed"
    transport.deliver("/joint_states", joint_state([0, 0], [19, 0]))
    assert bench.tick([0.5, 0.5]).mode == RUNNING
    transport.deliver("/joint_states", joint_state([0, 0], [21, 0]))
    ticks = 0
    while bench.tick([0.5, 0.5]).mode != STOPPED:
        transport.deliver("/joint_states", joint_state([0, 0], [21, 0]))
        ticks += 1
        assert ticks < 200
    assert bench.supervisor.state.reason == "effort of shoulder is 21, at most 20 is allowed"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "/joint_states has not shown the joints yet"),
        (joint_state([0, 0], []), "/joint_states has not shown the joints yet: no effort of elbow"),
        (joint_state([0, 0], [0, math.nan]), "/joint_states has not shown the joints yet: no effort of elbow"),
    ],
)
def test_without_efforts_it_holds_and_says_why(tmp_path: Path, message: JointState | None, reason: str) -> None:
    bench, transport = effort_bench(tmp_path, max_effort={"elbow": 5})
    if message is not None:
        transport.deliver("/joint_states", message)
    bench.tick([0.5, 0.5])
    assert bench.supervisor.state == (HOLDING, reason)


def test_joints_that_no_longer_come_hold(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    virtual.install(monkeypatch, "real_robot")
    bench, transport = effort_bench(tmp_path, max_effort={"elbow": 5})
    transport.deliver("/joint_states", joint_state([0, 0], [0, 0]))
    assert bench.tick([0.5, 0.5]).mode == RUNNING
    for seconds, mode in ((0.24, RUNNING), (0.02, HOLDING)):
        virtual.sleep(seconds)
        assert bench.tick([0.5, 0.5]).mode == mode
    assert bench.supervisor.state.reason == "/joint_states has not shown the joints for 0.25 s"


def test_a_joint_that_nobody_measures_is_said(tmp_path: Path) -> None:
    path = joint_contract(tmp_path, seven_joints(), SEVEN[:6])
    contract = load_contract(path)
    with pytest.raises(ConfigError, match=r"joint7 is neither commanded by position nor measured; .*model.fixed"):
        ModelCheck(contract)
    fixed = load_contract(path, ["model.fixed.joint7=0.5"])
    assert ModelCheck(fixed).summary().startswith("robot.urdf: 7 joints, parts kept 0.01 m apart; neighbors: 7")
