"""`vla-rl robot guard` on ROS 1 and on ROS 2: deploy dies, hangs or runs wild, and the robot stands.

The simulated robot is a driver that follows its last twist for ever here. One deployment of each graph goes through the
trials, in their order.
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
from deployment import CONTRACT, RATE, Deployment, on_both_graphs, report
from processes import Child, json_lines, until

from real_robot.contract.load import shipped_contracts

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
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

    def __init__(self, folder: Path, graph: str, overrides: tuple[str, ...] = ()) -> None:
        self.guard_overrides = overrides
        options = ("--start", "--guarded")
        sim = ["command_timeout=1000"]
        here = ["episode={begin: '', reset: ''}"]  # a deploy that starts lays out no scene: the arm would jump
        super().__init__(folder, overrides=here, contract=contract_of(folder), sim=sim, options=options, graph=graph)

    def start_server(self) -> Child:
        self.guard = self.start_guard()
        return super().start_server()

    def start_guard(self) -> Child:
        return self.graph.cli(
            "guard", "robot", "guard", self.contract, self.graph.transport, *CONTRACT, *self.guard_overrides
        )

    def check_limits(self) -> None:
        twists = np.array([line["twist"][:3] for line in json_lines(self.trace) if line["twist"]])
        assert np.abs(twists).max() <= SPEED * (1 + 1e-6)
        assert np.abs(np.diff(twists, axis=0)).max() <= 3 * SPEED / BRAKING / RATE, "the robot hears each 2nd or so"


session = on_both_graphs(Guarded)


@pytest.fixture
def robot(session: Guarded) -> Iterator[Guarded]:
    session.await_ticks()
    session.reset()  # where a trial that failed has left a stop
    time.sleep(1.0)
    yield session
    session.check_limits()


def check_last_motion(robot: Guarded, since: float, within: float) -> None:
    time.sleep(within + 1.0)
    took = robot.last_motion() - since
    report(took)
    assert took < within


WITHIN = TIMEOUT + BRAKING + 2 / RATE + 0.25  # the robot's own ticks, and a busy machine


def test_a_deploy_that_hangs_is_braked_and_stopped_when_it_wakes(robot: Guarded) -> None:
    hung = time.monotonic()
    robot.deploy.signal(signal.SIGSTOP)
    check_last_motion(robot, hung, WITHIN)
    time.sleep(2)
    robot.deploy.signal(signal.SIGCONT)
    until(lambda: robot.deploy.says("stopped: this process stood still"), "the stop", 10)
    robot.check_stands(time.monotonic() + 0.3, 1.0)
    robot.reset()


def test_a_stop_button_stops_both(robot: Guarded) -> None:
    button = robot.graph.node("button", "/stop", "2")
    until(lambda: button.says("ready"), "the button's listeners")
    robot.await_motion()
    time.sleep(1.0)
    button.type("\n")
    check_last_motion(robot, button.said_at("pressed"), BRAKING + 2 / RATE + 0.25)
    assert robot.mode() == "stopped" and robot.guard.says("stopped: ")
    button.type("\n")
    until(lambda: button.says("released"), "the button's release")
    robot.reset()


def test_a_stop_at_deploys_keys_stops_the_guard_and_a_reset_there_lets_both_go_on(robot: Guarded) -> None:
    pressed = time.monotonic()
    robot.deploy.type(" ")
    until(lambda: robot.guard.says("stopped: keyboard, at vla-rl deploy on"), "the guard's stop", 10)
    check_last_motion(robot, pressed, BRAKING + 3 / RATE + 0.25)
    before = robot.guard.output().count("holding: reset")
    robot.deploy.type("r")
    until(lambda: robot.guard.output().count("holding: reset") > before, "the guard's reset", 10)
    robot.deploy.type("\n")
    robot.await_motion()


def test_a_killed_deploy_is_braked(robot: Guarded) -> None:
    killed = time.monotonic()
    robot.graph.end(robot.deploy)
    check_last_motion(robot, killed, WITHIN)
    assert robot.guard.says(f"no whole command for {TIMEOUT:g} s: deploy rests, or is gone")


HOSTILE = """
import random, sys, time
from real_robot.contract.load import load_contract
from real_robot.transports.messages import JointState, TwistStamped
from real_robot.transports.base import QosConfig
import numpy as np
contract = load_contract("sim_robot", [sys.argv[1]])
transport = contract.open_transport("hostile")
twist = transport.advertise("/twist_command/guarded", TwistStamped, QosConfig())
gripper = transport.advertise("/gripper/command/guarded", JointState, QosConfig())
none = np.zeros(0)
while not transport.has_listener("/twist_command/guarded"):
    time.sleep(0.05)
end, sent = time.time() + 8, 0
print("up", flush=True)
while time.time() < end or sent < 250:  # some of each kind on a busy machine too
    sent += 1
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


def test_whatever_is_sent_to_the_guard_keeps_the_robots_limits(session: Guarded) -> None:
    """And at its end the robot stands. No deploy runs."""
    robot = session
    hostile = robot.graph.start("hostile", "-c", HOSTILE, robot.graph.transport)
    until(lambda: hostile.says("up"), "the hostile node")
    assert hostile.process.wait(60) == 0
    ended = time.monotonic()
    assert robot.moves(ended - 6), "good commands among them are followed"
    check_last_motion(robot, ended, WITHIN)
    for why in ("future", "stale", "unstamped", "NaN or infinity", "no value of joint gripper"):
        assert f"a command is refused: {why}" in robot.guard.output()
    robot.check_limits()


@pytest.mark.slow
def test_deploy_without_the_guard_is_refused_while_it_is_there(session: Guarded) -> None:
    robot = session
    second = robot.graph.cli("second", *robot.command("--start"))
    robot.graph.children.remove(second)
    try:
        assert second.process.wait(60) == 2
        assert "by vla-rl robot guard on" in second.output() and "give --guarded" in second.output()
    finally:
        second.kill()


def test_another_deploy_drives_on_and_a_guard_that_is_ended_brakes_and_stops_it(session: Guarded) -> None:
    robot = session
    robot.deploy = robot.graph.cli("third", *robot.command())
    robot.await_motion()
    time.sleep(1.0)
    asked = time.monotonic()
    robot.guard.signal(signal.SIGTERM)
    assert robot.guard.process.wait(30) == 143
    robot.graph.children.remove(robot.guard)
    check_last_motion(robot, asked, BRAKING + 2 / RATE + 0.5)
    until(lambda: robot.mode() == "stopped", "deploy's stop", 10)
    assert robot.deploy.says("stopped: the robot's guard is gone")
    robot.check_limits()


@pytest.mark.slow
def test_a_guard_that_is_killed_stops_deploy(session: Guarded) -> None:
    """Nobody can brake the robot then but its driver."""
    robot = session
    if robot.guard.process.poll() is not None:  # the test above has ended it
        robot.guard = robot.start_guard()
        robot.reset()
    robot.await_motion()
    robot.graph.end(robot.guard)
    until(lambda: robot.mode() == "stopped", "deploy's stop", 10)


@pytest.mark.slow
def test_without_a_guard_a_killed_deploy_leaves_the_robot_moving(session: Guarded) -> None:
    """What the guard is for."""
    robot = session
    robot.graph.end(robot.deploy)
    robot.deploy = robot.graph.cli("unguarded", *robot.command("--start"))
    robot.await_motion()
    robot.graph.end(robot.deploy)
    time.sleep(2)
    assert robot.moves(time.monotonic() - 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ros1", "rclpy"])
def test_the_guard_holds_while_the_wrench_is_not_measured_then_stops_deploy_too(tmp_path: Path, graph: str) -> None:
    robot = Guarded(tmp_path, graph, overrides=("safety.wrench={topic: /wrench, max_force: 20}",))
    try:
        until(lambda: robot.guard.says("/wrench has not shown force and torque yet"), "the hold")
        until(lambda: any(np.any(line["sent"][:3]) for line in json_lines(robot.ticks) if line["sent"]), "commands")
        time.sleep(2)
        assert not robot.moves(since=0), "deploy asks, the guard forwards no motion"
        until(lambda: robot.mode() == "stopped", "deploy's stop", 10)
        assert robot.deploy.says("stopped: /wrench has not shown force and torque yet, at vla-rl robot guard on")
    finally:
        robot.close()
