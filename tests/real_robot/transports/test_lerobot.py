"""Robots of LeRobot's as a transport: a registered arm of ours, and LeRobot's SO-101 on a line of simulated servos."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_contract import arm_contract, opened
from kinematic_arm import KinematicArm
from virtual_time import VirtualTime

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand, Tick
from real_robot.control.supervisor import Supervisor
from real_robot.transports.base import TransportError
from real_robot.types import RobotObservation

DEGREE = np.pi / 180


@pytest.fixture(autouse=True)
def threads(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual.install(monkeypatch, "real_robot", "real_robot.transports.lerobot", "kinematic_arm")


class Person:
    """An operator of the loop: active, until told otherwise."""

    def __init__(self) -> None:
        self.commands: list[OperatorCommand] = []

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return self.commands.pop(0) if self.commands else OperatorCommand()


class Bench:
    """The whole robot side around one contract, in threads, with a policy that asks for `target`."""

    def __init__(self, virtual: VirtualTime, contract: RobotContract, robot: TopicRobot, target: list[float]) -> None:
        self.target, self.ticks, self.person = target, [], Person()
        self.supervisor = Supervisor(contract.safety)
        self.loop = ControlLoop(
            robot,
            SynchronousActions(lambda observation: np.array([self.target], np.float32)),
            self.supervisor,
            self.person,
            ClockPacer(contract.rate),
            silence=contract.silence,
            observers=[self.ticks.append],
        )
        self._thread = virtual.Thread(self.loop.run)
        self.ticks: list[Tick]

    def __enter__(self) -> Bench:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.person.commands.append(OperatorCommand(finished=True))
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def mode(self) -> str:
        return self.supervisor.state.mode


def test_observations_come_by_name_in_the_contracts_order_and_units(virtual: VirtualTime, tmp_path: Path) -> None:
    with opened(arm_contract(tmp_path)) as robot:
        seen = virtual.until(robot.read, "an observation", 20)
        assert seen.state == pytest.approx([0.5, 10 * DEGREE, -20 * DEGREE], abs=1e-6)
        assert seen.images["front"].shape == (24, 32, 3) and tuple(seen.images["front"][0, 0]) == (200, 0, 0)
        assert 0 <= virtual.monotonic() - seen.stamp < 0.2
        before = seen.stamp
        virtual.until(lambda: (s := robot.read()) is not None and s.stamp > before, "a newer one", 20)


def test_commands_reach_the_robot_within_its_limits(virtual: VirtualTime, tmp_path: Path) -> None:
    contract = arm_contract(tmp_path)
    with opened(contract) as robot, Bench(virtual, contract, robot, [2.0, -0.5, 9.0]) as bench:
        arm = KinematicArm.made[-1]
        virtual.until(lambda: bench.mode == "running", "running", 20)
        virtual.until(lambda: arm.sent and arm.sent[-1]["elbow.pos"] > 57.0, "the upper limit", 20)
        sent = np.array([[a["gripper.pos"], a["shoulder.pos"], a["elbow.pos"]] for a in arm.sent])
        assert sent[:, 0].max() == pytest.approx(100) and sent[:, 2].max() <= 57.2958 + 1e-3
        assert sent[-1, 1] == pytest.approx(-0.5 / DEGREE, abs=0.01)
        values = np.array([t.sent.values for t in bench.ticks if t.sent is not None and t.sent.values is not None])
        assert np.abs(np.diff(values, axis=0)).max() <= 1 / contract.rate + 1e-6
        assert values[0] == pytest.approx([0.5, 10 * DEGREE, -20 * DEGREE], abs=0.03), "it starts where the robot is"
        assert len(arm.threads) == 1, "the bus belongs to one thread"


def test_a_hung_bus_is_held_within_the_time_out_and_stopped_until_a_reset(virtual: VirtualTime, tmp_path: Path) -> None:
    contract = arm_contract(tmp_path)
    with opened(contract) as robot, Bench(virtual, contract, robot, [0.5, 0.9, 0.0]) as bench:
        arm = KinematicArm.made[-1]
        virtual.until(lambda: bench.mode == "running" and len(arm.sent) > 3, "running", 20)
        arm.answers.clear()
        hung = virtual.monotonic()
        virtual.until(lambda: bench.mode != "running", "the hold", 20)
        running = [t.time for t in bench.ticks if t.sent is not None and t.sent.mode == "running"]
        assert running[-1] - hung < contract.safety.observation_timeout + 0.3, "one tick late on a busy machine"
        virtual.until(lambda: bench.mode == "stopped", "the stop", 20)
        assert "does not answer" in bench.supervisor.state.reason
        assert max(t.latency for t in bench.ticks) < 0.2, "no tick waits for the bus"
        arm.answers.set()
        virtual.until(lambda: robot.fault is None, "that a reset is possible", 20)
        assert bench.mode == "stopped", "a person must reset"
        bench.person.commands.append(OperatorCommand(reset="ann", begin=True))
        virtual.until(lambda: bench.mode == "running", "running again", 20)


def test_after_an_outage_nothing_is_sent_that_would_make_the_arm_jump(virtual: VirtualTime, tmp_path: Path) -> None:
    contract = arm_contract(tmp_path, "transport.max_command_age=0.1")
    with opened(contract) as robot:
        arm = KinematicArm.made[-1]
        state = virtual.until(robot.read, "an observation", 20).state
        ahead = (state + np.array([0.0, 0.2, 0.0])).astype(np.float32)  # the shoulder, 11 degrees on
        arm.answers.clear()
        virtual.sleep(0.3)
        arm.answers.set()

        def refused() -> bool:
            robot.send(ahead)
            return bool(robot.dropped.get("withheld"))

        virtual.until(refused, "the refusal", 20)
        assert not arm.sent
        assert "not where it was told to be" in str(robot.fault)
        virtual.until(lambda: robot.fault is None, "that a reset is possible", 20)
        robot.send(state)
        virtual.until(lambda: len(arm.sent) == 1, "a command near where it is", 20)
        robot.send(ahead)
        virtual.until(lambda: len(arm.sent) == 2, "the next, wherever", 20)


@pytest.mark.parametrize("error", [ConnectionError("no status packet"), TypeError("port is None")])
def test_a_bus_that_fails_holds_then_stops_and_says_why(virtual: VirtualTime, tmp_path: Path, error: Exception) -> None:
    contract = arm_contract(tmp_path)
    with opened(contract) as robot, Bench(virtual, contract, robot, [0.5, 0.9, 0.0]) as bench:
        arm = KinematicArm.made[-1]
        virtual.until(lambda: bench.mode == "running", "running", 20)
        arm.error = error
        virtual.until(lambda: bench.mode == "holding", "the hold", 20)
        virtual.until(lambda: bench.mode == "stopped", "the stop", 20)
        assert str(error) in bench.supervisor.state.reason
        assert robot.dropped["observation"]["unreadable"] > 0
        arm.error = None


def test_a_camera_that_freezes_makes_the_observation_stale(virtual: VirtualTime, tmp_path: Path) -> None:
    contract = arm_contract(tmp_path, "silence=30")
    with opened(contract) as robot, Bench(virtual, contract, robot, [0.5, 0.9, 0.0]) as bench:
        virtual.until(lambda: bench.mode == "running", "running", 20)
        KinematicArm.made[-1].cameras["front"].frozen = virtual.perf_counter()
        virtual.until(lambda: bench.mode == "holding", "the hold", 20)
        virtual.sleep(0.3)
        assert bench.mode == "holding" and robot.missing() == ["front"]


def test_the_end_disconnects_and_turns_the_motors_off(virtual: VirtualTime, tmp_path: Path) -> None:
    with opened(arm_contract(tmp_path)) as robot:
        virtual.until(robot.read, "an observation", 20)
        arm = KinematicArm.made[-1]
        assert arm.torque
    assert not arm.torque and len(arm.threads) == 1
    robot.close()  # twice does no harm


def test_a_bus_that_hangs_at_the_end_is_told(
    virtual: VirtualTime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(arm_contract(tmp_path)) as robot:
        virtual.until(robot.read, "an observation", 20)
        arm = KinematicArm.made[-1]
        arm.answers.clear()
    assert "MOTORS MAY STILL BE ON" in caplog.text
    arm.answers.set()


def test_a_command_that_waited_too_long_is_not_sent(virtual: VirtualTime, tmp_path: Path) -> None:
    contract = arm_contract(tmp_path, "transport.max_command_age=0.1")
    with opened(contract) as robot:
        virtual.until(robot.read, "an observation", 20)
        arm = KinematicArm.made[-1]
        arm.answers.clear()
        virtual.sleep(0.1)
        robot.send(np.array([0.5, 0.5, 0.5], np.float32))
        virtual.sleep(0.3)
        arm.answers.set()
        virtual.until(lambda: robot.dropped.get("old"), "the refusal", 20)
        assert not arm.sent


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["transport.robot=kinematic_leg"], "no robot 'kinematic_leg'. Did you mean 'kinematic_arm'.*so101_follower"),
        (["transport.settings.speed=3"], "`speed`.*settings are: port, start, calibrated, id"),
        (["transport.port=missing"], "cannot connect: Could not connect on port"),
        (["transport.settings.calibrated=false"], "not calibrated.*lerobot-calibrate --robot.type=kinematic_arm"),
        (["transport.modules=[no_such_module]"], "No module named 'no_such_module'.*\\.\\[lerobot\\]"),
        (["transport.cameras.front.index=0"], "cameras: each has a `type`"),
        (["observation.images.front.topic=side"], "no topic 'side' for this; it has: observation, front$"),
        (["observation.images.front.type=sensor_msgs/CompressedImage"], "front: type is sensor_msgs/Image"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(TransportError, match=message), opened(arm_contract(tmp_path, *overrides)):
        pass


@pytest.mark.parametrize(
    ("part", "joints", "message"),
    [
        (
            "observation",
            ["gripper.pos", "wrist.pos", "elbow.pos"],
            "no 'wrist.pos'; it has: shoulder.pos, elbow.pos, g",
        ),
        ("action", ["shoulder.pos", "elbow.pos", "hand.pos"], "no 'hand.pos'; it has: shoulder.pos, elbow.pos, grippe"),
    ],
)
def test_a_joint_that_the_robot_lacks_lists_those_that_it_has(
    tmp_path: Path, part: str, joints: list[str], message: str
) -> None:
    values: Any = arm_contract(tmp_path).model_dump()
    section = values["observation"]["state"] if part == "observation" else values["action"]
    section[0]["joints"] = joints
    with pytest.raises(TransportError, match=message), opened(RobotContract.model_validate(values)):
        pass
    assert not KinematicArm.made[-1].torque, "let go again"


def test_without_lerobot_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot.robots", None)
    with pytest.raises(TransportError, match=r"pip install '\.\[lerobot\]'"):
        arm_contract(tmp_path).transport.open()
