"""`vla-rl robot guard` on a real ROS 1 graph: deploy dies, hangs or runs wild, and the robot stands.

The simulated robot is a driver that follows its last twist for ever here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from deployment import RATE, Deployment
from processes import Child, json_lines, missing_ros, until

from real_robot.contract.load import shipped_contracts

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there"),
]
SPEED, BRAKING = 0.05, 0.2  # of light_server's circle, m/s; seconds to a standstill
TIMEOUT = 0.4  # four ticks


def contract_of(folder: Path) -> str:
    """The simulated robot's contract, with a robot that must brake gently."""
    values: dict[str, Any] = yaml.safe_load(shipped_contracts()["sim_robot"].read_text())
    for limits in values["safety"]["dimensions"]:
        if limits["kind"] == "velocity":
            limits |= {"low": -SPEED, "high": SPEED, "max_acceleration": SPEED / BRAKING}
    path = folder / "gentle.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


class Guarded(Deployment):
    """Deploy through a guard, to a driver without a watchdog."""

    def __init__(
        self, folder: Path, options: tuple[str, ...] = ("--start", "--guarded"), overrides: tuple[str, ...] = ()
    ) -> None:
        self.overrides = overrides  # of the guard's contract alone
        super().__init__(folder, contract=contract_of(folder), sim=["command_timeout=1000"], options=options)

    def start_server(self) -> Child:
        if "--guarded" in self.options:
            overrides = [*self.transport(), f"rate={RATE}", "observation.max_age=0.5", "safety.observation_timeout=0.5"]
            overrides += self.overrides
            self.guard = self.graph.cli("guard", "robot", "guard", self.contract, *overrides)
        return super().start_server()

    def check_limits(self) -> None:
        twists = np.array([line["twist"][:3] for line in json_lines(self.trace) if line["twist"]])
        assert np.abs(twists).max() <= SPEED * (1 + 1e-6)
        assert np.abs(np.diff(twists, axis=0)).max() <= 3 * SPEED / BRAKING / RATE, "the robot hears each 2nd or so"


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Guarded]:
    deployment = Guarded(tmp_path)
    try:
        deployment.await_motion()
        time.sleep(1.0)
        yield deployment
        deployment.check_limits()
    finally:
        deployment.close()


def check_last_motion(robot: Guarded, since: float, within: float) -> None:
    time.sleep(within + 1.0)
    took = robot.last_motion() - since
    print(f"last motion after {1000 * took:.0f} ms")
    assert took < within


WITHIN = TIMEOUT + BRAKING + 2 / RATE + 0.25  # the robot's own ticks, and a busy machine


def test_without_a_guard_a_killed_deploy_leaves_the_robot_moving(tmp_path: Path) -> None:
    """What the guard is for."""
    robot = Guarded(tmp_path, options=("--start",))
    try:
        robot.await_motion()
        robot.deploy.kill()
        time.sleep(3)
        assert robot.moves(time.monotonic() - 0.5)
    finally:
        robot.close()


def test_a_killed_deploy_is_braked_and_another_one_drives_on(robot: Guarded) -> None:
    killed = time.monotonic()
    robot.deploy.kill()
    check_last_motion(robot, killed, WITHIN)
    assert robot.guard.says(f"no whole command for {TIMEOUT:g} s: deploy rests, or is gone")
    robot.deploy = robot.graph.cli("again", *robot.command())
    robot.await_motion()


def test_the_guard_holds_while_the_wrench_is_not_measured(tmp_path: Path) -> None:
    robot = Guarded(tmp_path, overrides=("safety.wrench={topic: /wrench, max_force: 20}",))
    try:
        until(lambda: robot.guard.says("/wrench has not shown force and torque yet"), "the hold")
        until(lambda: any(np.any(line["sent"][:3]) for line in json_lines(robot.ticks) if line["sent"]), "commands")
        time.sleep(2)
        assert not robot.moves(since=0), "deploy asks, the guard forwards no motion"
    finally:
        robot.close()


def test_a_deploy_that_hangs_is_braked_and_stopped_when_it_wakes(robot: Guarded) -> None:
    hung = time.monotonic()
    robot.deploy.signal(signal.SIGSTOP)
    check_last_motion(robot, hung, WITHIN)
    time.sleep(2)
    robot.deploy.signal(signal.SIGCONT)
    until(lambda: robot.deploy.says("stopped: this process stood still"), "the stop", 10)
    robot.check_stands(time.monotonic() + 0.3, 2.0)
    robot.reset()


def test_a_stop_button_stops_both_and_the_guard_alone_too(robot: Guarded) -> None:
    button = robot.graph.start("button", "tests/real_robot/press.py", "/stop")
    until(lambda: button.says("pressed"), "the button")
    check_last_motion(robot, float(button.output().split()[1]), BRAKING + 2 / RATE + 0.25)
    assert robot.mode() == "stopped" and robot.guard.says("stopped: ")


def test_a_stop_at_deploys_keys_stops_the_guard_and_a_reset_there_lets_both_go_on(robot: Guarded) -> None:
    pressed = time.monotonic()
    robot.deploy.type(" ")
    until(lambda: robot.guard.says("stopped: keyboard, at vla-rl deploy on"), "the guard's stop", 10)
    check_last_motion(robot, pressed, BRAKING + 3 / RATE + 0.25)
    robot.deploy.type("r")
    until(lambda: robot.guard.says("holding: reset"), "the guard's reset", 10)
    robot.deploy.type("\n")
    robot.await_motion()


def test_a_guard_that_is_ended_brakes_and_deploy_stops(robot: Guarded) -> None:
    asked = time.monotonic()
    robot.guard.signal(signal.SIGTERM)
    assert robot.guard.process.wait(30) == 143
    check_last_motion(robot, asked, BRAKING + 2 / RATE + 0.5)
    until(lambda: robot.mode() == "stopped", "deploy's stop", 10)
    assert robot.deploy.says("stopped: the robot's guard is gone")


def test_a_guard_that_is_killed_stops_deploy(robot: Guarded) -> None:
    """Nobody can brake the robot then but its driver."""
    robot.guard.kill()
    until(lambda: robot.mode() == "stopped", "deploy's stop", 10)
    assert robot.deploy.says("stopped: the robot's guard is gone")


def test_deploy_without_the_guard_is_refused_while_it_is_there(robot: Guarded) -> None:
    robot.deploy.type("q")
    assert robot.deploy.process.wait(30) == 0
    robot.options = ("--start",)
    second = robot.graph.cli("second", *robot.command())
    robot.graph.children.remove(second)
    try:
        assert second.process.wait(60) == 2
        assert "by vla-rl robot guard on" in second.output() and "give --guarded" in second.output()
    finally:
        second.kill()


HOSTILE = """
import random, sys, time
from real_robot.contract.load import load_contract
from real_robot.transports.messages import JointState, TwistStamped
from real_robot.transports.base import QosConfig
import numpy as np
contract = load_contract("sim_robot", [f"transport.master={sys.argv[1]}"])
transport = contract.transport.open()
twist = transport.advertise("/twist_command/guarded", TwistStamped, QosConfig())
gripper = transport.advertise("/gripper/command/guarded", JointState, QosConfig())
none, end = np.zeros(0), time.time() + 15
print("up", flush=True)
while time.time() < end:
    now = time.time_ns()
    stamp = random.choice([now] * 20 + [now + 10**12, now - 10**12, 0])
    vector = np.array([random.choice([1, -1, 1e30, -1e30, 0.03, 0.0, *[0.04] * 5]) for _ in range(6)])
    if random.random() < 0.1:
        vector[random.randrange(6)] = random.choice([np.nan, np.inf])
    name = ("gripper",) if random.random() < 0.95 else ("grip",)
    gripper(JointState(stamp=stamp, name=name, position=np.array([0.5]), velocity=none, effort=none))
    twist(TwistStamped(stamp=stamp, frame_id="table", linear=vector[:3], angular=vector[3:]))
    time.sleep(random.random() * 0.1)
"""


def test_whatever_is_sent_to_the_guard_keeps_the_robots_limits(robot: Guarded) -> None:
    """And at its end the robot stands."""
    robot.deploy.kill()
    hostile = robot.graph.start("hostile", "-c", HOSTILE, robot.graph.master.uri)
    until(lambda: hostile.says("up"), "the hostile node")
    assert hostile.process.wait(60) == 0
    ended = time.monotonic()
    assert robot.moves(ended - 10), "good commands among them are followed"
    check_last_motion(robot, ended, WITHIN)
    for why in ("future", "stale", "unstamped", "NaN or infinity", "no value of joint gripper"):
        assert f"a command is refused: {why}" in robot.guard.output()
