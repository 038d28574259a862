"""What a robot reports and cannot be: each is told by name, held within a tick, and stopped where it lasts."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.plausibility import FrozenCamera
from real_robot.control.supervisor import SentCommand, Supervisor
from real_robot.types import Command, RobotObservation
from sim.tabletop.env import TabletopConfig
from vla_rl.config import validate
from vla_rl.types import EpisodeSpec

HZ = 20.0
TICK = 1 / HZ
JOINT = {"kind": "position", "low": -110, "high": 110, "max_velocity": 60, "max_acceleration": 240, "max_jerk": 2400}
JOINTS = {
    "dimensions": [
        {"name": "shoulder", **JOINT, "state": 0},
        {"name": "elbow", **JOINT, "state": 1},
        {
            "name": "gripper",
            "kind": "position",
            "low": 0,
            "high": 100,
            "max_velocity": 150,
            "state": 2,
            "follows": False,
        },
    ]
}
BOX = {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.3] * 3, "high": [0.3] * 3}
TWIST = {
    "dimensions": [{"name": n, "kind": "velocity", "low": -0.2, "high": 0.2} for n in "xyz"],
    "workspace": BOX,
}
AXIS = {"kind": "position", "low": -1, "high": 1, "max_velocity": 0.2, "max_following_error": 1.0}
POSE = {"dimensions": [{**AXIS, "name": n, "state": i} for i, n in enumerate("xyz")], "workspace": BOX}


class Robot:
    """A robot that does what it is told, `lag` ticks late, but where a test says otherwise; and its supervisor."""

    def __init__(self, config: dict[str, Any], lag: int = 0, **options: Any) -> None:
        self.config = validate(SafetyConfig, {"control_hz": HZ, **config, **options})
        self.now = 100.0
        self.supervisor = Supervisor(self.config, lambda: self.now)
        self.state = np.zeros(3, np.float32)
        self.blocked: list[int] = []
        self.images: dict[str, np.ndarray] = {}
        self._orders: deque[np.ndarray] = deque([np.zeros(3)] * lag)

    def tick(self, *values: float, shown: Any = None) -> SentCommand:
        self.now += TICK
        state = self.state.copy() if shown is None else np.array(shown, np.float32)
        self.supervisor.observe(RobotObservation(dict(self.images), state, "", self.now))
        sent = self.supervisor.filter(Command(np.array(values, np.float32), "policy", self.now))
        if sent.values is not None:
            self._orders.append(sent.values)
            self._obey(self._orders.popleft())
        return sent

    def _obey(self, values: np.ndarray) -> None:
        for i, limits in enumerate(self.config.dimensions):
            if i not in self.blocked:
                self.state[i] = values[i] if limits.kind == "position" else self.state[i] + values[i] * TICK

    @property
    def reason(self) -> str:
        return self.supervisor.state.reason

    def check_holds_then_stops(self, name: str, *values: float, shown: Any = None) -> None:
        """At this tick it holds, by that rule; two seconds on it has stopped."""
        sent = self.tick(*values, shown=shown)
        assert sent.mode == "holding" and name in sent.limited, (sent, self.reason)
        modes = [self.tick(*values, shown=shown).mode for _ in range(45)]
        assert modes.index("stopped") == pytest.approx(2.0 / TICK, abs=2)
        self.supervisor.reset("anna")


def test_a_blocked_joint_does_not_run_on() -> None:
    robot = Robot(JOINTS)
    robot.blocked = [0]
    modes = [robot.tick(90.0, 0.0, 50.0).mode for _ in range(60)]
    assert modes[1] == "running" and modes.index("holding") * TICK <= 1.0
    assert robot.reason.startswith("shoulder is at 0 and was sent to") and "limit 15" in robot.reason
    assert modes[-1] == "stopped"


def test_a_joint_that_lags_and_a_gripper_that_holds_something_are_no_trouble() -> None:
    robot = Robot(JOINTS, lag=8)
    robot.blocked = [2]
    for k in range(200):
        assert robot.tick(100.0 if k < 120 else -60.0, -20.0, 100.0).mode == "running", robot.reason
    assert robot.state[1] == pytest.approx(-20, abs=0.1)


def test_in_a_dry_run_nothing_follows() -> None:
    robot = Robot(JOINTS, dry_run=True)
    assert {robot.tick(90.0, 0.0, 50.0).mode for _ in range(60)} == {"running"}


def test_a_joint_that_jumps_is_not_believed_until_it_is_back() -> None:
    robot = Robot(JOINTS)
    robot.tick(0.0, 0.0, 0.0)
    sent = robot.tick(0.0, 0.0, 0.0, shown=[0, 60, 0])
    assert sent.mode == "holding" and "jump" in sent.limited
    assert robot.reason == "elbow jumped from 0 to 60 in 0.050 s, by more than 20"
    assert robot.tick(0.0, 0.0, 0.0).mode == "running", "it was a reading, no motion"
    robot.check_holds_then_stops("jump", 0.0, 0.0, 0.0, shown=[0, 60, 0])
    robot.state[1] = 60
    assert robot.tick(0.0, 60.0, 0.0).mode == "running", "after a reset it is where it is"


@pytest.mark.parametrize("config", [TWIST, POSE], ids=["velocities", "poses"])
def test_a_pose_that_teleports(config: dict[str, Any]) -> None:
    robot = Robot(config)
    assert robot.tick(0.0, 0.0, 0.0).mode == "running"
    robot.check_holds_then_stops("jump", 0.0, 0.0, 0.0, shown=[0, 0.25, 0])


def test_a_new_episode_may_begin_elsewhere() -> None:
    robot = Robot(TWIST)
    robot.tick(0.0, 0.0, 0.0)
    robot.supervisor.begin()
    assert robot.tick(0.0, 0.0, 0.0, shown=[0, 0.25, 0]).mode == "running"


def test_a_joint_measured_beyond_its_limits() -> None:
    robot = Robot(JOINTS, checks={"jump_margin": 1.0})
    robot.tick(0.0, 0.0, 0.0)
    assert robot.tick(0.0, 0.0, 0.0, shown=[0, 0, 104]).mode == "running", "a little is noise"
    assert robot.tick(0.0, 0.0, 0.0, shown=[-125, 0, 0]).mode == "holding"
    assert robot.reason.startswith("shoulder is measured at -125, beyond its limits -110..110 by more than 11")
    robot.check_holds_then_stops("measured_limits", 0.0, 0.0, 0.0, shown=[0, 0, 106])


@pytest.mark.parametrize("config", [TWIST, POSE], ids=["velocities", "poses"])
def test_a_pose_far_outside_the_workspace(config: dict[str, Any]) -> None:
    robot = Robot(config, checks={"pose_jump": 9.0, "jump_margin": 9.0})
    robot.tick(0.0, 0.0, 0.0)
    assert robot.tick(0.0, 0.0, 0.0, shown=[0, 0, 0.34]).mode == "running", "the way back is open"
    assert robot.tick(0.0, 0.0, 0.0, shown=[0, 0, -0.36]).mode == "holding"
    assert robot.reason == "the end effector's z is -0.360 m, outside the workspace -0.3..0.3 by more than 0.05 m"
    robot.check_holds_then_stops("workspace", 0.0, 0.0, 0.0, shown=[0, 0.4, 0])


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (480, 640, 3), dtype=np.uint8)


@pytest.mark.parametrize("config", [JOINTS, TWIST], ids=["joints", "velocities"])
def test_a_frozen_camera_is_told_by_the_robots_motion(config: dict[str, Any]) -> None:
    target, back = ((50.0, 0.0, 0.0), (-50.0, 0.0, 0.0)) if config is JOINTS else ((0.1, 0, 0), (-0.1, 0, 0))
    robot = Robot(config)
    robot.images = {"front": picture(0), "wrist": picture(1)}
    assert {robot.tick(0.0, 0.0, 0.0).mode for _ in range(60)} == {"running"}, "nothing moves, nothing changes"
    for k in range(25):
        robot.images = {"front": picture(0), "wrist": picture(k)}
        robot.tick(*target)
    assert "camera front has shown the same picture" in robot.reason, "the other camera works"
    robot.images = {"front": picture(2), "wrist": picture(3)}
    assert robot.tick(*back).mode == "running"


def with_clock(picture: np.ndarray, k: int) -> np.ndarray:
    picture = picture.copy()
    picture[2:6, 50:54] = k % 256
    return picture


def test_a_clock_that_goes_on_in_a_frozen_picture_hides_nothing() -> None:
    frozen = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for side in (4, 16):
        robot = Robot(TWIST)
        for k in range(40):
            shown = with_clock(frozen, k)
            shown[30 : 30 + side // 2, 20 : 20 + side] = 3 * k if side == 16 else shown[30, 20]
            robot.images = {"front": shown}
            robot.tick(0.1, 0.0, 0.0)
        assert ("camera front has shown the same picture" in robot.reason) is (side == 4), (
            "something else moves as well"
        )


def test_something_small_that_moves_with_the_robot_is_no_clock() -> None:
    """A dot of 3 x 3 of 64 x 64 pixels, in a picture without noise."""
    robot, plain = Robot(TWIST), np.full((64, 64, 3), 90, np.uint8)
    for _ in range(60):
        shown = plain.copy()
        at = 20 + round(60 * float(robot.state[0]))
        shown[30:33, at : at + 3] = 200
        robot.images = {"front": shown}
        assert robot.tick(0.1, 0.0, 0.0).mode == "running", robot.reason


def test_a_renderer_that_shows_the_arm_is_not_frozen() -> None:
    env = TabletopConfig().make()
    for task in ("push_to_zone", "pick_place"):
        env.reset(EpisodeSpec(task, "train", 0))
        check = FrozenCamera(load_contract("sim_robot").safety)
        for k in range(60):
            env.apply(np.clip(env.expert_action(), -1, 1))
            seen = env.observe()
            images = {name: with_clock(image, k) for name, image in seen.images.items()}
            observation = RobotObservation(images, seen.state, "", 0.05 * k)
            assert check.trouble(observation, None) is None


def test_a_black_camera() -> None:
    robot = Robot(TWIST)
    robot.images = {"front": picture(0)}
    robot.tick(0.0, 0.0, 0.0)
    robot.images = {"front": picture(0) // 64}
    robot.check_holds_then_stops("black_camera", 0.1, 0.0, 0.0)
    assert robot.tick(0.0, 0.0, 0.0).mode == "holding"
    assert robot.reason == "camera front is black: mean brightness 1.5 of 255, limit 5"


def test_a_camera_of_another_size() -> None:
    robot = Robot(TWIST)
    robot.images = {"front": picture(0)}
    robot.tick(0.0, 0.0, 0.0)
    robot.images = {"front": picture(0)[:240]}
    assert robot.tick(0.0, 0.0, 0.0).mode == "holding"
    assert robot.reason == "camera front: pictures of 240 x 640, at first of 480 x 640"
    robot.check_holds_then_stops("image_size", 0.0, 0.0, 0.0)


def test_the_checks_cost_little() -> None:
    """Of pictures only some pixels are looked at."""
    import time

    robot = Robot(TWIST)
    robot.images = {name: np.full((1080, 1920, 3), 90, np.uint8) for name in ("front", "left", "wrist")}
    spent = []
    for _ in range(50):
        begin = time.thread_time()
        robot.tick(0.0, 0.0, 0.0)
        spent.append(time.thread_time() - begin)
    assert np.median(spent) < 0.005
