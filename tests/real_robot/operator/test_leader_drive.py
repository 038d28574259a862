"""A leader arm that is driven to where the robot is: how fast, until when, and what a hand on it does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from feetech_bus import GOAL, FeetechBus
from hypothesis import given, settings
from hypothesis import strategies as st
from kinematic_arm import KinematicLeader
from processes import until

from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.contract.sections import DeviceConfig
from real_robot.operator.devices import SILENCE, LeaderArm, leader_command, leader_feedback, open_device
from real_robot.operator.leader import HELD_FOR, MOST_STEP, RESISTS, LeaderDrive, LeaderFollowing
from real_robot.transports.lerobot_devices import DeviceError

SAFETY = load_contract("so101").safety
RANGE = np.array([d.high - d.low for d in SAFETY.dimensions])
TICK, SPEED, WITHIN = 1 / 30, 0.2, 0.03


class Bench:
    """A leader that is at once where it is told, but for joints that are `held`; the robot was told `told`."""

    def __init__(self, at: np.ndarray) -> None:
        self.now = 10.0
        self.at, self.told = at.astype(np.float32), np.zeros(len(RANGE), np.float32)
        self.held: list[int] = []
        self.goals: list[np.ndarray | None] = []
        self.lines: list[str] = []
        self.error = ""
        drive = LeaderDrive(self, SAFETY, WITHIN, SPEED, self.lines.append, lambda: self.now)
        self.following = LeaderFollowing(self, SAFETY, WITHIN, 0.25, self.lines.append, lambda: self.now, drive)

    def target(self) -> tuple[np.ndarray, float] | None:
        return self.at.copy(), self.now

    def drive(self, goal: np.ndarray | None) -> None:
        self.goals.append(goal)
        if goal is not None:
            free = [i for i in range(len(RANGE)) if i not in self.held]
            self.at[free] = goal[free]

    def step(self, driving: bool = True, mode: str = "holding", seconds: float = TICK) -> np.ndarray | None:
        self.now += seconds
        found = self.following.step(driving, self.told, mode)
        return None if found is None else found[0]

    @property
    def torque(self) -> bool:
        return bool(self.goals) and self.goals[-1] is not None

    def moved(self) -> np.ndarray:
        """Largest step of the goal, as a share of each number's range."""
        goals = np.array([goal for goal in self.goals if goal is not None])
        return np.abs(np.diff(goals, axis=0)).max(0) / RANGE if len(goals) > 1 else np.zeros(len(RANGE))


def test_it_is_driven_held_and_let_go_and_then_followed() -> None:
    bench = Bench(0.3 * RANGE)
    began = bench.now
    while not any("take it in hand" in line for line in bench.lines):
        assert bench.step() is None and bench.now < began + 5
    assert bench.now - began == pytest.approx(0.3 / SPEED, abs=0.1)
    assert bench.at == pytest.approx(bench.told) and bench.torque
    arrived = bench.now
    while bench.step() is None:
        assert bench.torque
    assert not bench.torque
    assert bench.now - arrived == pytest.approx(HELD_FOR, abs=0.1)
    assert bench.step() is not None
    assert bench.step(mode="running") is not None and bench.following.drives
    bench.at[0] = 30
    assert bench.step(mode="running") is not None and not bench.torque
    assert bench.moved().max() <= SPEED * TICK + 1e-6


def test_a_leader_that_is_there_already_is_not_driven() -> None:
    bench = Bench(0.01 * RANGE)
    assert bench.step() is not None and bench.goals == []


@pytest.mark.parametrize("joint", [0, 5])
def test_a_hand_that_holds_it_has_it_let_go_and_aligns_it(joint: int) -> None:
    bench = Bench(0.4 * RANGE)
    bench.held = [joint]
    for _ in range(60):
        assert bench.step() is None
    assert not bench.torque, "off"
    name = SAFETY.dimensions[joint].name
    assert any(f"does not follow at {name} and was let go" in line for line in bench.lines)
    assert abs(bench.at[0] if joint else bench.at[1]) >= (0.4 - RESISTS - SPEED * TICK * 2) * RANGE[1 - bool(joint)] - 1
    let_go = len(bench.goals)
    bench.at[:] = 0
    assert bench.step() is not None, "aligned by hand"
    assert len(bench.goals) == let_go


@pytest.mark.parametrize("why", ["end", "stop", "silence"])
def test_an_interruption_lets_it_go_at_once(why: str) -> None:
    bench = Bench(0.4 * RANGE)
    for _ in range(10):
        bench.step()
    assert bench.torque
    if why == "silence":
        bench.following._clock = lambda: bench.now + 1.0
        bench.step()
    else:
        bench.step(driving=why != "end", mode="stopped" if why == "stop" else "holding")
    assert not bench.torque
    bench.following._clock = lambda: bench.now
    bench.step()
    assert bench.torque == (why == "end"), "once in each take-over"


@given(
    at=st.lists(st.floats(-0.5, 0.5), min_size=6, max_size=6),
    ticks=st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(-1, 5), st.floats(-0.3, 0.3)), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_however_ticks_come_and_hands_pull_its_speed_is_bounded(
    at: list[float], ticks: list[tuple[float, int, float]]
) -> None:
    bench = Bench(np.array(at) * RANGE)
    times: list[float] = []
    for seconds, joint, pull in ticks:
        before = len(bench.goals)
        bench.step(seconds=seconds)
        times += [seconds] * (len(bench.goals) - before)
        if joint >= 0 and bench.torque:
            bench.at[joint] += pull * RANGE[joint]
    goals = [goal for goal in bench.goals if goal is not None]
    for before, after, seconds in zip(goals, goals[1:], times[1:], strict=False):
        assert (np.abs(after - before) <= SPEED * seconds * RANGE + 1e-4 * RANGE).all()


# --- LeRobot's SO-101 leader on a line of simulated servos --------------------------------------------

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
STEPS = 4095 / 360  # of the encoder, a degree


@pytest.fixture
def bus() -> Iterator[FeetechBus]:
    line = FeetechBus(low=1024, high=3072)
    yield line
    line.unplug()


def so101_leader(bus: FeetechBus, folder: Path, align: str = "drive_leader") -> tuple[RobotContract, LeaderArm]:
    pytest.importorskip("scservo_sdk", reason="needs the servos' SDK: pip install '.[lerobot]'")
    joints = {
        joint: {"id": i, "drive_mode": 0, "homing_offset": 0, "range_min": 1024, "range_max": 3072}
        for i, joint in enumerate(JOINTS, 1)
    }
    (folder / "leader.json").write_text(json.dumps(joints))
    config = DeviceConfig.model_validate(
        {
            "kind": "lerobot",
            "teleoperator": "so101_leader",
            "id": "leader",
            "port": bus.port,
            "align": align,
            "settings": {"calibration_dir": str(folder), "num_read_retries": 5},
        }
    )
    contract = load_contract("so101")

    def connected() -> LeaderArm | None:
        try:
            leader = open_device(config, contract, ())
        except DeviceError as error:  # A servo has 50 ms to answer, more than a busy machine may leave simulated ones.
            if "motor check failed" not in str(error) and "status packet" not in str(error):
                raise
            return None
        assert isinstance(leader, LeaderArm)
        return leader

    return contract, until(connected, "the leader", 60)


def follow(leader: LeaderArm, contract: RobotContract, lines: list[str]) -> Callable[[np.ndarray], np.ndarray | None]:
    """A control tick of a take-over in which the robot was told this."""
    drive = LeaderDrive(leader, contract.safety, WITHIN, 0.5, lines.append)
    following = LeaderFollowing(leader, contract.safety, WITHIN, 1.0, lines.append, drive=drive)

    def step(told: np.ndarray) -> np.ndarray | None:
        found = following.step(True, told, "holding")
        return None if found is None else found[0]

    return step


def test_lerobots_leader_is_driven_with_torque_and_let_go(bus: FeetechBus, tmp_path: Path) -> None:
    contract, leader = so101_leader(bus, tmp_path)
    lines: list[str] = []
    told = np.array([30, -10, 20, 0, 0, 50], np.float32)
    with closing(leader):
        step = follow(leader, contract, lines)
        assert bus.torque == [0] * 6, "a hand moves it until the take-over"
        until(lambda: step(told) is None and all(bus.torque), "its torque", 20)
        until(lambda: step(told) is not None or any("take it in hand" in line for line in lines), "it is there", 30)
        there = pytest.approx([2048 + angle * STEPS for angle in told[:5]], abs=2)
        until(lambda: step(told) is not None or [bus.value(i, GOAL) for i in range(1, 6)] == there, "the last goal", 20)
        assert [bus.value(i, GOAL) for i in range(1, 6)] == there
        until(lambda: step(told) is not None, "followed", 30)
        until(lambda: bus.torque == [0] * 6, "let go", 20)
    first = bus.goals[0]
    assert all(abs(goal - 2048) <= 2 for goal in first.values()), "told first where it is, so that nothing jumps"
    pans = [goals[1] for goals in bus.goals]
    # Between two goals on the line the leader may have been read twice.
    assert max(abs(b - a) for a, b in itertools.pairwise(pans)) <= 2 * MOST_STEP * RANGE[0] * STEPS + 2


def test_lerobots_leader_is_let_go_where_a_hand_holds_it_or_nobody_asks(bus: FeetechBus, tmp_path: Path) -> None:
    contract, leader = so101_leader(bus, tmp_path)
    lines: list[str] = []
    told = np.array([80, 0, 0, 0, 0, 50], np.float32)
    bus.held = {1}
    with closing(leader):
        step = follow(leader, contract, lines)
        until(lambda: step(told) is not None or any("was let go" in line for line in lines), "letting go", 30)
        assert "shoulder_pan" in next(line for line in lines if "was let go" in line)
        until(lambda: bus.torque == [0] * 6, "torque off", 20)
        leader.drive(told)
        until(lambda: all(bus.torque), "its torque", 20)
        until(lambda: bus.torque == [0] * 6, f"torque off {SILENCE} s after the last word of a loop that died", 20)


def test_feedback_is_the_command_backwards(bus: FeetechBus, tmp_path: Path) -> None:
    contract = load_contract("so101")
    command = np.array([30, -10, 20, 5, -5, 40], np.float32)
    names = {"hand.pos": "gripper.pos"}
    feedback = leader_feedback(command, names, contract)
    assert "hand.pos" in feedback and leader_command(feedback, names, contract) == pytest.approx(command)


def test_a_leader_without_motors_cannot_be_driven(tmp_path: Path) -> None:
    from arm_contract import arm_contract

    config = DeviceConfig(
        kind="lerobot",
        teleoperator="kinematic_leader",
        modules=("kinematic_arm",),
        align="drive_leader",
        settings={"calibration_dir": str(tmp_path)},
    )
    with pytest.raises(DeviceError, match="drive_leader needs a leader with motors"):
        open_device(config, arm_contract(tmp_path), ())
    assert not KinematicLeader.made[-1].connected
