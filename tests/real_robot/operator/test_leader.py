"""A person's devices: a leader arm that must be aligned before it drives, and devices that give axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_contract import arm_contract, opened
from kinematic_arm import KinematicArm, KinematicLeader
from virtual_time import VirtualTime

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.contract.sections import DeviceConfig
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand, Tick
from real_robot.control.supervisor import Supervisor
from real_robot.operator.console.operator import ConsoleOperator, ConsoleState
from real_robot.operator.devices import device_overrides, leader_command, lerobot_axes, open_device, spacemouse_axes
from real_robot.operator.intervention import Intervention
from real_robot.operator.leader import SAY_EVERY, LeaderFollowing
from real_robot.operator.operators import Operators
from real_robot.operator.teleop import Teleoperation
from real_robot.transports.lerobot_devices import DeviceError
from real_robot.types import RobotObservation
from vla_rl.config import ConfigError

LEADER = DeviceConfig(kind="lerobot", teleoperator="kinematic_leader", modules=("kinematic_arm",))


class Bench:
    """The following of a leader, by hand: robot told `told`, leader at `at`, read at `read`."""

    def __init__(self) -> None:
        self.now, self.read = 100.0, 100.0
        self.at, self.told = np.zeros(6, np.float32), np.zeros(6, np.float32)
        self.lines: list[str] = []
        self.error = ""
        safety = load_contract("so101").safety
        self.following = LeaderFollowing(self, safety, 0.03, 0.25, self.lines.append, lambda: self.now)

    def target(self) -> tuple[np.ndarray, float] | None:
        return self.at.copy(), self.read

    def step(self, driving: bool = True, mode: str = "running", hears: bool = True) -> np.ndarray | None:
        self.now += 0.03
        self.read = self.now if hears else self.read
        found = self.following.step(driving, self.told, mode)
        return None if found is None else found[0]


def test_a_leader_that_is_elsewhere_is_not_followed_and_the_console_says_where_to_move_it() -> None:
    bench = Bench()
    bench.at[:] = (20, 0, 0, 0, 0, 50)
    for _ in range(20):
        assert bench.step(mode="holding") is None
    assert bench.lines == ["move the leader to the robot: shoulder_pan by -20, gripper by -50"]
    bench.at[0] = 3
    bench.now += SAY_EVERY
    assert bench.step(mode="holding") is None
    assert bench.lines[1:] == ["move the leader to the robot: gripper by -50"]
    bench.at[5] = 2
    assert bench.step(mode="holding") == pytest.approx(bench.at)
    assert bench.step(mode="running") == pytest.approx(bench.at)
    assert bench.following.drives and "aligned" in bench.lines[-1]
    bench.at[0] = 60  # now it may run ahead: the supervisor limits what comes of it
    assert bench.step() == pytest.approx(bench.at)


@pytest.mark.parametrize("reason", ["control", "silence", "hold", "stop"])
def test_after_an_interruption_it_must_be_aligned_anew(reason: str) -> None:
    bench = Bench()
    for _ in range(3):
        bench.step()
    assert bench.following.drives
    bench.at[0] = 60
    if reason == "control":
        assert bench.step(driving=False) is None
    elif reason == "silence":
        bench.now += 0.3
        assert bench.step(hears=False) is None and "silent" in bench.lines[-1]
    else:
        assert bench.step(mode={"hold": "holding", "stop": "stopped"}[reason]) is None
    assert bench.step() is None and not bench.following.drives
    bench.at[0] = 0
    assert bench.step() is not None


def test_while_the_robot_does_not_run_the_leader_may_not_wander_off() -> None:
    bench = Bench()
    assert bench.step(mode="holding") is not None, "aligned, but a deadman switch is released"
    bench.at[0] = 60
    assert bench.step(mode="holding") is None


# --- with LeRobot's classes, in the loop ------------------------------------------------------------


class Ends:
    def __init__(self) -> None:
        self.finished = False

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return OperatorCommand(finished=self.finished)


class Whole:
    """Robot, leader, supervisor, intervention and loop."""

    def __init__(self, contract: RobotContract, robot: TopicRobot, leader: Any) -> None:
        self.ticks: list[Tick] = []
        self.console_state = ConsoleState(contract)
        self.intervention = Intervention([d.kind for d in contract.safety.dimensions], command_timeout=0.2)
        self.lines: list[str] = []
        self.following = LeaderFollowing(leader, contract.safety, 0.03, 0.2, self.lines.append)
        teleoperation = Teleoperation(contract.teleop, contract.safety)
        self.console = ConsoleOperator(
            self.intervention, teleoperation, self.console_state, 60.0, leader=self.following
        )
        self.ends = Ends()
        self.supervisor = Supervisor(contract.safety)
        self.loop = ControlLoop(
            robot,
            SynchronousActions(lambda observation: np.array([[0.5, 0.2, -0.3]], np.float32)),
            self.supervisor,
            Operators([self.console, self.intervention, self.ends]),
            ClockPacer(contract.rate),
            observers=[self.intervention, self.console_state, self.ticks.append],
        )

    def sources(self) -> list[str]:
        running = [t for t in self.ticks if t.sent and t.sent.mode == "running" and t.requested]
        return [t.requested.source for t in running if t.requested]


@contextmanager
def whole(virtual: VirtualTime, tmp_path: Path) -> Iterator[Whole]:
    contract = arm_contract(tmp_path)
    config = LEADER.model_copy(update={"settings": {"calibration_dir": str(tmp_path)}})
    with opened(contract) as robot:
        leader = open_device(config, contract, ())
        bench = Whole(contract, robot, leader)
        thread = virtual.Thread(bench.loop.run)
        thread.start()
        try:
            yield bench
        finally:
            bench.ends.finished = True
            thread.join(20)
            leader.close()
    assert not KinematicLeader.made[-1].connected and not KinematicArm.made[-1].torque


@pytest.fixture
def clock(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    virtual.install(monkeypatch, "real_robot", "real_robot.transports.lerobot", "kinematic_arm")
    return virtual


def test_a_take_over_with_a_leader_arm_does_not_jump(clock: VirtualTime, tmp_path: Path) -> None:
    with whole(clock, tmp_path) as bench:
        arm, leader = KinematicArm.made[-1], KinematicLeader.made[-1]
        leader.position = {"shoulder.pos": -40.0, "elbow.pos": 30.0, "gripper.pos": 0.0}
        bench.console.controller_seen()
        bench.intervention.begin("ann")
        clock.until(lambda: "policy" in bench.sources(), "the policy", 20)
        bench.intervention.take_over("ann")
        clock.until(lambda: any("move the leader" in line for line in bench.lines), "the line on the console", 20)
        clock.until(lambda: bench.supervisor.state.mode == "holding", "the hold", 20)
        assert "recovery" not in bench.sources(), "not followed from afar"
        leader.position = dict(arm.position)
        clock.until(lambda: "recovery" in bench.sources() and bench.following.drives, "following", 20)
        goal = arm.position["shoulder.pos"] + 20

        def led() -> bool:
            """Lead the arm to the goal."""
            assert bench.following.drives and bench.supervisor.state.mode == "running"
            leader.position = dict(arm.position) | {"shoulder.pos": goal}
            return abs(arm.position["shoulder.pos"] - goal) < 0.1

        clock.until(led, "the robot at the leader", 60)
        values = np.array([t.sent.values for t in bench.ticks if t.sent is not None and t.sent.values is not None])
        assert np.abs(np.diff(values, axis=0)).max() <= 1 / 50 + 1e-6, "one tick at full speed"
        leader.error = ConnectionError("unplugged")
        clock.until(
            lambda: any("silent (ConnectionError: unplugged)" in line for line in bench.lines), "the silence", 20
        )
        clock.until(lambda: bench.supervisor.state.mode == "holding", "the hold", 20)


def test_without_a_console_in_control_the_leader_is_not_followed(clock: VirtualTime, tmp_path: Path) -> None:
    with whole(clock, tmp_path) as bench:
        clock.until(lambda: bench.console_state.last_sent is not None or bench.ticks, "ticks", 20)
        bench.intervention.demonstrate("ann")
        clock.until(lambda: bench.supervisor.state.mode == "holding" and len(bench.ticks) > 30, "holding", 20)
        assert bench.sources() == []
        KinematicLeader.made[-1].position = dict(KinematicArm.made[-1].position)
        bench.console.controller_seen()
        clock.until(lambda: "demo" in bench.sources(), "following", 20)


def test_a_leader_speaks_the_contracts_units(tmp_path: Path) -> None:
    contract = arm_contract(tmp_path)
    action = {"shoulder.pos": 90.0, "elbow.pos": 0.0, "hand.pos": 25.0}
    command = leader_command(action, {"hand.pos": "gripper.pos"}, contract)
    assert command == pytest.approx([0.25, np.pi / 2, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("teleoperator", "robot", "message"),
    [
        (
            "kinematic_leader",
            "so101",
            "no value of joint shoulder_pan.pos.*it has: shoulder.pos, elbow.pos, gripper.pos",
        ),
        ("kinematic_leader", "franka_servo", "a leader arm gives joints; /servo_node/delta_twist_cmds takes"),
        ("so999_leader", "so101", "no teleoperator 'so999_leader'. Did you mean 'so"),
        ("gamepad", "so101", "gives motion along x, y, z; the robot's commands have none"),
    ],
)
def test_a_device_that_does_not_fit_is_refused(tmp_path: Path, teleoperator: str, robot: str, message: str) -> None:
    config = LEADER.model_copy(update={"teleoperator": teleoperator, "settings": {"calibration_dir": str(tmp_path)}})
    contract = load_contract(robot)
    with pytest.raises(DeviceError, match=message):
        open_device(config, contract, Teleoperation(contract.teleop, contract.safety).moves)


def test_what_gamepads_say() -> None:
    rest = {"delta_x": 0.0, "delta_y": 0.0, "delta_z": 0.0, "gripper": 1}
    assert lerobot_axes(rest) is None
    axes = lerobot_axes({**rest, "delta_y": -0.5})
    assert axes is not None and axes.values == pytest.approx([0, -0.5, 0, 0, 0, 0]) and axes.gripper is None
    axes = lerobot_axes({**rest, "gripper": 2})
    assert axes is not None and axes.gripper == "open"


def test_what_a_spacemouse_says() -> None:
    """pyspacemouse's own decoding of a SpaceNavigator's reports: one channel of translation, one of rotation."""
    library = pytest.importorskip("pyspacemouse")

    reports = [
        bytes([1, 0, 0, 0x51, 0xFF, 0, 0]),  # 175 of 350 away from the person
        bytes([2, 0, 0, 0, 0, 2, 0]),  # a rotation within the dead zone
        bytes([3, 2]),  # the right button
    ]

    class Hid:
        def read(self, size: int) -> bytes:
            return reports.pop(0) if reports else b""

        def close(self) -> None: ...

    spec = library.apply_axis_convention(library.get_device_specs()["SpaceNavigator"], library.AxisConvention.ROS)
    mouse = library.SpaceMouseDevice(spec, Hid())
    axes = spacemouse_axes(mouse)
    assert axes is not None and axes.values == pytest.approx([0.5, 0, 0, 0, 0, 0], abs=0.01)
    assert axes.gripper == "open" and not reports, "the queue is emptied"


def test_without_a_spacemouse_the_error_says_what_to_do() -> None:
    contract = load_contract("franka_servo")
    with pytest.raises(DeviceError, match="spacemouse: "):
        open_device(DeviceConfig(kind="spacemouse"), contract, ("x", "y", "z"))


@pytest.mark.parametrize("name", ["joystick", "lerobot:", "lerobot"])
def test_a_wrong_name_of_a_device_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed: gamepad, phone, spacemouse, or lerobot:NAME"):
        device_overrides(name)


def test_the_command_lines_device_reaches_the_contract() -> None:
    overrides = (*device_overrides("lerobot:so101_leader"), "teleop.device.port=/dev/ttyACM1")
    device = load_contract("so101", overrides).teleop.device
    assert device is not None and (device.teleoperator, device.port) == ("so101_leader", "/dev/ttyACM1")
