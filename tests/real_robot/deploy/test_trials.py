"""Trials of docs/safety.md with camera, pedal, server, deploy and robot as processes, on ROS 1 and on ROS 2.

One deployment of each graph goes through all of them, in their order. In each the robot must stand within the time
that its contract says, and go on by itself only after a short fault, else after a person's reset.
"""

from __future__ import annotations

import http.client
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from deployment import MAX_AGE, RATE, SILENCE, Deployment, on_both_graphs, report
from processes import Child, json_lines, until
from websockets.sync.client import connect

from real_robot.transports.ros.master import free_port

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

SLOW, AHEAD = pytest.mark.slow, r"stamped \+"
DEADMAN, BLIND = 0.4, 0.4  # seconds; of the pedal, and in which every silence of the server's ends in a hold
ALLOWED = 2 / RATE + 0.35  # this tick, the robot's own, and a busy machine
OTHER = """
import sys, time
from real_robot.contract.load import load_contract
from real_robot.guard.robot_lock import QOS, TOPIC, new_lease
from real_robot.transports.messages import String
contract = load_contract("sim_robot", [sys.argv[1]])
transport = contract.open_transport("other")
publish = transport.advertise(TOPIC, String, QOS)
while not transport.has_listener(TOPIC):
    time.sleep(0.05)
time.sleep(0.5)
lease = new_lease("robot guard", "x", ["/twist_command"])
print("pressed", time.monotonic(), flush=True)
publish(String(data=lease.model_copy(update={"state": "yields", "epoch": 50, "stopped": "a button"}).model_dump_json()))
sys.stdin.readline()
publish(String(data=lease.model_copy(update={"state": "yields", "epoch": 51}).model_dump_json()))
sys.stdin.readline()
"""


class Trials(Deployment):
    """A robot that is driven while a pedal is held, by chunks of eight seconds; its camera's pictures can be faulty."""

    def __init__(self, folder: Path, graph: str) -> None:
        overrides = ["operator.deadman=/pedal", "safety.deadman=true", f"safety.deadman_timeout={DEADMAN}"]
        super().__init__(folder, "long", True, overrides, graph=graph)
        self.teller = self.graph.node("say", "/fault")
        until(lambda: self.mode() == "holding" and self.deploy.says("deadman switch released"), "the first hold")
        assert not self.moves(0.0), "never heard: released"
        self.pedal = self.graph.node("pedal")

    def recover(self) -> None:
        """What a trial that failed has left: a button that is pressed, processes that hang, a pedal that is gone, a
        stop. Ends with motion.
        """
        own = (self.camera, self.sim, self.server, self.deploy, self.teller, self.pedal)
        for child in list(self.graph.children):
            if child not in own:
                self.graph.end(child)
            elif child.process.poll() is None:
                child.signal(signal.SIGCONT)
        if self.pedal.process.poll() is not None:
            self.pedal = self.graph.node("pedal")
        self.await_ticks()
        self.reset()

    def told_to_move(self) -> float:
        """When deploy last sent something that moves the robot, monotonic seconds."""
        return max(line["time"] for line in json_lines(self.ticks) if line["sent"] and np.any(line["sent"][:6]))

    def tell_camera(self, fault: str) -> tuple[float, float]:
        """Switch the fault. Returns when its first picture was taken, and when it was published, by the camera."""
        camera = self.camera
        assert camera is not None
        before = len(camera.output())
        self.teller.type(f"{fault}\n")
        pattern = rf"^{fault} (\S+) (\S+)$"
        found = until(lambda: re.search(pattern, camera.output()[before:], re.MULTILINE), "the first faulty picture")
        return float(found[1]), float(found[2])

    def check_motion_ends_with(self, last_stamp: float) -> float:
        """Judge by stamps alone, so that a busy machine changes nothing: the robot was never moved by an observation
        that is older than it may be, nor by one made after `last_stamp`. Returns seconds from then to the last motion.
        """
        stamp, moved = float("-inf"), []
        for line in json_lines(self.ticks):
            stamp = line["stamp"] or stamp
            if line["sent"] and np.any(line["sent"][:6]):
                moved.append(line["time"])
                assert line["time"] - stamp <= MAX_AGE, "moved by an observation that is too old"
                assert stamp <= last_stamp, f"moved by an observation made {stamp - last_stamp:.3f} s after it"
        return max(moved) - last_stamp

    def check_stops_in_time(self) -> None:
        """Every tick later than `silence` after the last new observation was a stop, whenever it came."""
        seen, stamp = float("inf"), float("-inf")
        for line in json_lines(self.ticks):
            if line["stamp"] and line["stamp"] > stamp:
                seen, stamp = line["time"], line["stamp"]
            assert line["time"] - seen <= SILENCE or line["mode"] == "stopped"


session = on_both_graphs(Trials)


@pytest.fixture
def robot(session: Trials) -> Trials:
    session.recover()
    return session


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hung", "killed"])
def test_a_pedal_whose_node_is_gone_counts_as_released(robot: Trials, how: signal.Signals) -> None:
    robot.pedal.signal(how)
    gone = time.monotonic()
    robot.check_stands(gone + DEADMAN + 1.5 / RATE, 1.5)
    seconds = robot.told_to_move() - gone
    report(seconds)
    assert seconds <= DEADMAN + 1 / RATE and robot.mode() == "holding"
    if how == signal.SIGSTOP:
        robot.pedal.signal(signal.SIGCONT)
    else:
        robot.graph.end(robot.pedal)
        robot.pedal = robot.graph.node("pedal")
    robot.await_motion()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("stale", r"stamped -10\.\d\d s from this machine's clock"),
        ("corrupt", "JPEG cut off"),
        pytest.param("skewed", rf"{AHEAD}0\.[1-9]\d s from this machine's clock, at most \+0\.1 s", marks=SLOW),
        pytest.param("ahead", rf"{AHEAD}3\d{{3}}\.\d\d s", marks=SLOW),
        pytest.param("behind", r"stamped -3\d{3}\.\d\d s", marks=SLOW),
    ],
)
def test_pictures_that_cannot_be_used_stop_the_robot(robot: Trials, fault: str, told: str) -> None:
    _, published = robot.tell_camera(fault)
    until(lambda: robot.mode() == "stopped", "the stop")
    report(robot.check_motion_ends_with(published))
    robot.check_stops_in_time()
    for what in ("holding: observations are stale", "stopped: no (observation|action) for 3 s"):
        assert re.search(f"safety: {what}: agentview: its messages are refused: .*{told}", robot.deploy.output()), what
    robot.tell_camera("none")
    robot.check_stands(time.monotonic(), 1.0)
    assert robot.mode() == "stopped"
    robot.reset()


@pytest.mark.parametrize(
    ("fault", "reason", "seconds"),
    # The frozen camera needs a second, and as much again for the 2 cm of motion that tell it from a robot that stands.
    [("black", "camera agentview is black", 0.0), ("frozen", "camera agentview has shown the same picture", 2.0)],
)
def test_pictures_that_show_nothing_new_stop_the_robot(robot: Trials, fault: str, reason: str, seconds: float) -> None:
    """They are fresh and whole: only their pixels tell."""
    taken, _ = robot.tell_camera(fault)
    until(lambda: robot.mode() == "stopped", "the stop")
    report(robot.check_motion_ends_with(taken + seconds) + seconds)
    assert reason in robot.deploy.output()
    robot.tell_camera("none")
    robot.check_stands(time.monotonic(), 1.0)
    robot.reset()


def test_a_robot_that_hangs_is_held_and_goes_on_or_is_stopped(robot: Trials) -> None:
    """Its process is frozen (SIGSTOP): its connections stay open, and nothing raises."""
    robot.sim.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    after = frozen + MAX_AGE + 1.0
    lines = until(lambda: [line for line in json_lines(robot.ticks) if line["time"] > after], "ticks after it")
    assert lines[0]["mode"] == "holding"
    report(robot.check_motion_ends_with(frozen))
    robot.sim.signal(signal.SIGCONT)
    robot.await_motion()  # by itself

    robot.sim.signal(signal.SIGSTOP)
    until(lambda: robot.mode() == "stopped", "the stop", SILENCE + 5)
    robot.sim.signal(signal.SIGCONT)
    robot.check_stands(time.monotonic() + 0.3, 1.0)
    robot.reset()


def pressed_at(button: Child, word: str) -> float:
    button.type("\n")
    return button.said_at(word)


def test_a_stop_topic_stops_it_until_a_reset(robot: Trials) -> None:
    button = robot.graph.node("button", "/stop", "1")
    until(lambda: button.says("ready"), "the button's listener")
    robot.await_motion()
    pressed = pressed_at(button, "pressed")
    until(lambda: robot.mode() == "stopped", "the stop")
    time.sleep(0.5)
    took = robot.last_motion() - pressed
    report(took)
    assert took < ALLOWED
    robot.check_stands(time.monotonic(), 1.0)
    robot.deploy.type("r")
    until(lambda: robot.deploy.says("no reset while it lasts: stop topic"), "the refusal")
    pressed_at(button, "released")
    robot.reset()


def test_a_second_deploy_is_refused_and_names_the_first(robot: Trials) -> None:
    second = robot.graph.cli("second", *robot.command())
    robot.graph.children.remove(second)
    try:
        assert second.process.wait(60) == 2, second.output()[-3000:]
        said = re.search(
            r"driven already .*, by vla-rl deploy on (\S+), process (\d+), since (\d{4}-\S+ \S+)\.", second.output()
        )
        assert said and int(said[2]) == robot.deploy.process.pid
        robot.await_motion()
    finally:
        second.kill()


def test_a_stop_elsewhere_stops_it_and_a_reset_elsewhere_lets_it_go_on(robot: Trials) -> None:
    """Another of this robot's processes says that a person has stopped it."""
    other = robot.graph.start("other", "-c", OTHER, robot.graph.transport)
    pressed = other.said_at("pressed")
    until(lambda: robot.mode() == "stopped", "the stop")
    time.sleep(0.5)
    took = robot.last_motion() - pressed
    report(took)
    assert took < ALLOWED
    assert "a button, at vla-rl robot guard" in robot.deploy.output()
    robot.check_stands(time.monotonic(), 1.0)
    other.type("\n")
    robot.await_motion()
    robot.graph.end(other)


def test_a_server_that_hangs_in_the_middle_of_a_chunk(robot: Trials) -> None:
    began = time.monotonic()
    robot.server.signal(signal.SIGSTOP)
    until(lambda: robot.mode() == "stopped", "the stop", 20)
    took = robot.told_to_move() - began
    report(took)
    assert took <= BLIND
    robot.server.signal(signal.SIGCONT)
    robot.check_stands(time.monotonic(), 1.0)
    robot.reset()


def test_a_server_that_is_killed_and_comes_back_with_another_policy(robot: Trials) -> None:
    """A person's robot holds then until a new episode."""
    began = time.monotonic()
    robot.graph.end(robot.server)
    until(lambda: robot.mode() == "stopped" and robot.deploy.says("stopped: no action"), "the stop", 20)
    took = robot.told_to_move() - began
    report(took)
    assert took <= BLIND
    robot.behavior = "second"
    robot.server = robot.start_server()
    robot.reset(lambda: robot.deploy.says("alarm: the policy server now serves 2, in place of 1"))
    robot.check_stands(began + max(0.0, took) + ALLOWED, 1.0)
    robot.deploy.type("\n")
    robot.await_motion()


def test_sigterm_brakes_and_ends(robot: Trials) -> None:
    since = time.monotonic()
    assert robot.deploy.end() == 128 + signal.SIGTERM
    robot.graph.children.remove(robot.deploy)
    time.sleep(0.5)
    took = robot.last_motion() - since
    report(took)
    assert took < ALLOWED and "the robot was told to stand" in robot.deploy.output()
    robot.check_records()


@pytest.mark.slow
def test_a_post_stops_it_while_sixteen_viewers_watch(session: Trials) -> None:
    robot, console = session, free_port()
    if robot.deploy in robot.graph.children:  # no test above has ended it
        robot.deploy.end()
        robot.graph.children.remove(robot.deploy)
    robot.deploy = robot.graph.cli("watched", *robot.command("--start", "--console", str(console)))
    robot.await_motion()
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(connect(f"ws://127.0.0.1:{console}/socket", open_timeout=60)).recv(timeout=60)
        robot.await_motion()
        asked, connection = time.monotonic(), http.client.HTTPConnection("127.0.0.1", console, timeout=60)
        connection.request("POST", "/stop")
        assert connection.getresponse().status == 202
        connection.close()
        until(lambda: robot.mode() == "stopped", "the stop")
    time.sleep(0.5)
    took = robot.last_motion() - asked
    report(took)
    assert took < ALLOWED
