"""Goals of actions, from the control loop to the joint: each test on ROS 1, on ROS 2 and on ROS 2's wire.

ROS 1: a rosmaster, actionlib's servers and rospy's services. rclpy: Jazzy's action servers and services on Fast DDS.
ros2: DDS between two processes, the server in plain cyclonedds with types written by hand as rmw_cyclonedds lays them
out; not ROS 2 itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from action_scene import CONTRACT, Scene
from processes import open_graph, until

pytestmark = pytest.mark.live

GRAPHS = ("ros1", "ros2", "rclpy")
PROMPT = 400  # milliseconds in which a hold must have ended all motion


@pytest.fixture(scope="module", params=GRAPHS)
def robot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A robot whose servers are up."""
    with robot_of(request.param, tmp_path_factory.mktemp("robot")) as scene:
        scene.serve()
        yield scene


@pytest.fixture
def scene(robot: Scene) -> Scene:
    robot.begin()
    return robot


@pytest.fixture(params=GRAPHS)
def own_scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """A robot of the test's own, whose servers are not up yet."""
    with robot_of(request.param, tmp_path) as scene:
        yield scene


@contextmanager
def robot_of(kind: str, folder: Path) -> Iterator[Scene]:
    graph = open_graph(kind, folder)
    programs = {"ros1": ("ros1_robot.py",), "rclpy": ("rclpy_arm.py",), "ros2": ("ros2_robot.py", graph.domain)}
    program, *arguments = programs[kind]
    try:
        yield Scene(folder, graph.start, program, graph.transport.removeprefix("transport="), tuple(arguments))
    finally:
        graph.close()


def test_a_goal_is_sent_once_and_a_newer_one_preempts_it(scene: Scene) -> None:
    scene.run()
    scene.ask(finger=0.02, arm=[0.1, -0.1], suction=1.0)
    scene.awaits("running")
    until(lambda: scene.events("moved", joint="finger", position=0.02), "the gripper's goal", 30)
    until(lambda: scene.events("moved", joint="b", position=-0.1), "the arm's goal", 30)
    scene.ask(finger=0.0205, arm=[0.1, -0.1], suction=0.9)  # closer than goal.change, and the same switch
    until(lambda: scene.events("service", name="suction"), "the switch", 30)
    scene.ask(finger=0.03, arm=[0.1, -0.1], suction=0.2)
    until(lambda: scene.events("moved", joint="finger", position=0.03), "the second goal", 30)
    goals = scene.goals("gripper")
    assert [round(g["position"], 4) for g in goals] == [0.02, 0.03] and goals[0]["max_effort"] == 20
    until(lambda: len(scene.events("service", name="suction")) == 2, "the switch back", 30)
    assert [s["data"] for s in scene.events("service", name="suction")] == [True, False]
    (arm,) = scene.goals("arm")
    assert arm["seconds"] == 0.2 and list(arm["targets"]) == ["a", "b"]
    assert len(scene.events("service", name="start")) == 1, "the contract's start"

    scene.ask(finger=0.2, arm=[0.1, -0.1])
    until(lambda: scene.finger() > 0.035, "motion", 30)
    scene.ask(finger=0.0, arm=[0.1, -0.1])
    until(lambda: scene.finger() == 0.0, "the way back", 30)
    assert max(e["position"] for e in scene.events("moved", joint="finger")) < 0.19
    scene.awaits("running")
    assert len(scene.goals("arm")) == 1


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (-1.0, "goal rejected"),
        pytest.param(-2.0, "goal aborted", marks=pytest.mark.slow),
        pytest.param(-4.0, "goal canceled", marks=pytest.mark.slow),
        pytest.param(-5.0, "goal lost: no answer for 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_goal_that_fails_holds_then_stops_until_a_reset(scene: Scene, position: float, reason: str) -> None:
    scene.run()
    scene.ask(finger=0.01)
    until(lambda: scene.finger() == 0.01, "the first goal", 30)
    scene.ask(finger=-3.0)  # aborted because it stalled: a grip
    until(lambda: scene.events("goal", position=-3.0), "the grip", 30)
    scene.ask(finger=0.02)
    until(lambda: scene.finger() == 0.02, "a goal after the grip", 30)
    assert scene.states()[-1]["mode"] == "running"
    scene.ask(finger=position)
    scene.awaits("holding", f"/gripper_cmd: {reason}")
    scene.awaits("stopped", f"/gripper_cmd: {reason}")
    assert len(scene.events("goal", position=position)) == 1, "it is not tried again by itself"
    scene.ask(finger=0.0)
    scene.say(reset="a person")
    scene.awaits("running")
    until(lambda: scene.finger() == 0.0, "a goal after the reset", 30)


def test_the_doctor_sees_whether_the_servers_are_there(scene: Scene) -> None:
    contract = scene.folder / "robot.yaml"
    text = CONTRACT.read_text().replace("{kind: ros1}", scene.transport)
    contract.write_text(text.replace("topic: /gripper_cmd", "topic: /gripper_cmt"))
    doctor = scene.start("doctor", "-m", "vla_rl", "doctor", str(contract), "--json", "--seconds", "1")
    assert doctor.process.wait(90) == 1
    said = doctor.output()
    assert "no server of control_msgs/GripperCommand (near: /gripper_cmd)" in said
    assert "a server of control_msgs/FollowJointTrajectory is there" in said


def test_holds_and_stops_cancel_what_is_under_way_and_it_goes_on(scene: Scene) -> None:
    scene.run()
    scene.ask(finger=0.08, arm=[1.5, 0.0])
    until(lambda: scene.finger() > 0.004 and scene.events("moved", joint="a"), "motion", 30)
    held = time.monotonic()
    scene.say(action=None)  # no action of the policy's: a hold
    scene.awaits("holding")
    late = scene.last_motion_after(held, "finger", "a")
    assert late < PROMPT, f"ms to last motion of gripper and arm: {late}"
    assert scene.events("cancel", server="gripper") and scene.events("cancel", server="arm")
    assert scene.finger() < 0.07

    scene.ask(finger=0.08, arm=[1.5, 0.0])  # in the same place: it was canceled, so it is sent anew
    scene.awaits("running")
    until(lambda: scene.finger() == 0.08, "the rest of the way", 30)
    scene.ask(finger=0.0, arm=[1.5, 0.0])
    until(lambda: scene.finger() < 0.075, "the way back", 30)
    stopped = time.monotonic()
    scene.say(stop="the button")
    scene.awaits("stopped", "the button")
    assert scene.last_motion_after(stopped, "finger") < PROMPT
    assert scene.finger() > 0.01
    print(f"ms to last motion after a hold {late}, after a stop {scene.last_motion_after(stopped, 'finger')}")

    scene.say(reset="a person")
    scene.awaits("running")
    until(lambda: scene.finger() == 0.0, "the way back, after the reset", 30)
    scene.ask(finger=0.08, arm=[1.5, 0.0])
    until(lambda: scene.finger() > 0.005, "motion", 30)
    assert scene.loop is not None
    ended = time.monotonic()
    scene.loop.signal(signal.SIGTERM)  # the loop ends by itself
    assert scene.last_motion_after(ended, "finger") < PROMPT and scene.finger() < 0.07
    assert scene.loop.process.wait(30) == 0


def test_a_guard_gives_the_goals_and_cancels_them_when_the_loop_is_killed(scene: Scene) -> None:
    transport = f"transport={scene.transport}"
    guard = scene.start("guard", "-m", "vla_rl", "robot", "guard", str(CONTRACT), transport, "guard.timeout=0.3")
    until(lambda: guard.says("forwards"), "the guard", 60)
    if scene.loop is not None:
        scene.loop.kill()
    scene.run("--guarded")
    scene.ask(finger=0.08, arm=[1.5, 0.0], suction=1.0)
    until(lambda: scene.finger() > 0.004 and scene.events("moved", joint="a"), "motion", 30)
    until(lambda: scene.events("service", name="suction"), "the switch", 30)
    killed = time.monotonic()
    assert scene.loop is not None
    scene.loop.signal(signal.SIGKILL)
    late = scene.last_motion_after(killed, "finger", "a")
    print(f"ms to last motion {late}")
    assert late < 300 + PROMPT and scene.finger() < 0.079
    assert scene.events("cancel", server="gripper") and scene.events("cancel", server="arm")


@pytest.mark.slow
def test_a_server_that_is_missing_or_dies_holds_the_robot(own_scene: Scene) -> None:
    until(lambda: own_scene.robot.says("up"), "the robot")
    own_scene.run("start=[]")  # the servers are not there yet
    own_scene.ask(finger=0.08)
    own_scene.awaits("stopped", "/gripper_cmd: no server answers")
    own_scene.serve()
    own_scene.say(reset="a person")
    own_scene.awaits("holding")
    until(lambda: own_scene.states()[-1]["mode"] == "running" or own_scene.say(reset="a person"), "running", 30)
    until(lambda: own_scene.finger() > 0.005, "motion", 30)
    own_scene.robot.kill()
    killed = time.monotonic()
    own_scene.awaits("holding")
    assert next(s["time"] for s in own_scene.states() if s["time"] > killed) - killed < 1.0
    own_scene.awaits("stopped")


@pytest.mark.slow
def test_a_start_service_that_refuses_or_is_missing_ends_it(own_scene: Scene) -> None:
    own_scene.serve()
    for name, words in (("/refuse", "refused: not today"), ("/nowhere", "no server answers within 10 s")):
        loop = own_scene.start_loop(f"start=[{{service: {name}, type: std_srvs/Trigger}}]")
        assert loop.process.wait(60) == 1 and f"start: service {name}" in loop.output() and words in loop.output()
