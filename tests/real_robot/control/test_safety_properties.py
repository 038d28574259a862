"""For any commands, delays, losses and clock jumps, what the supervisor sends keeps its limits (hypothesis).

The checker knows nothing of how the supervisor works: it looks at the stream of sent values and the times alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sent_checker import Checker

from real_robot.contract.safety import SafetyConfig
from real_robot.control.supervisor import SentCommand, Supervisor
from real_robot.types import Command, RobotObservation

HZ = 20.0
TICK = 1 / HZ

JOINT = {"kind": "position", "low": -1.0, "high": 1.5, "max_velocity": 0.8, "max_acceleration": 4.0}
TWIST = {"kind": "velocity", "low": -0.25, "high": 0.3, "max_acceleration": 1.0}
SMOOTH = {**JOINT, "max_jerk": 40.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "joints": {
        "dimensions": [
            {"name": "j0", **JOINT, "state": 0},
            {"name": "j1", **JOINT, "state": 1, "max_step": 0.02, "stop_acceleration": 9.0},
            {"name": "j2", "kind": "position", "low": -0.1, "high": 0.3, "max_step": 0.05, "state": 2},
            {"name": "gripper", "kind": "position", "low": 0.0, "high": 0.0801, "max_velocity": 0.5, "start": 0.08},
        ],
    },
    "smooth joints": {
        "dimensions": [
            {"name": "j0", **SMOOTH, "state": 0},
            {"name": "j1", **SMOOTH, "state": 1, "stop_acceleration": 9.0, "stop_jerk": 300.0},
            {"name": "j2", **SMOOTH, "state": 2, "max_step": 0.02, "low": -0.1, "high": 0.3, "stop_acceleration": 8.0},
            {"name": "gripper", **JOINT, "low": 0.0, "high": 0.08, "max_jerk": 900.0, "start": 0.08},
        ],
    },
    "smooth twist": {
        "dimensions": [
            {"name": "vx", **TWIST, "max_jerk": 10.0},
            {"name": "vy", **TWIST, "max_jerk": 5.0, "stop_acceleration": 3.0, "stop_jerk": 60.0},
            {"name": "vz", **TWIST, "max_jerk": 8.0, "max_step": 0.02, "stop_acceleration": 2.0},
            {"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_velocity": 20, "start": -1},
        ],
        "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.5] * 3, "high": [0.5] * 3},
    },
    "twist": {
        "dimensions": [
            {"name": "vx", **TWIST},
            {"name": "vy", **TWIST, "max_step": 0.02, "stop_acceleration": 3.0},
            {"name": "vz", "kind": "velocity", "low": -0.1, "high": 0.1},
            {"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_velocity": 20, "start": -1},
        ],
        "workspace": {
            "state": [0, 1, 2],
            "commands": [0, 1, 2],
            "low": [-0.5, -0.5, -0.5],
            "high": [0.5, 0.5, 0.5],
        },
    },
    "twist without acceleration": {  # as sim_robot's
        "dimensions": [{"name": a, "kind": "velocity", "low": -1.0, "high": 1.0} for a in "xyz"]
        + [{"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_step": 1000, "start": 0}],
        "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.3] * 3, "high": [0.3] * 3},
    },
    "pose": {
        "dimensions": [{"name": a, **JOINT, "state": i} for i, a in enumerate("xyz")]
        + [{"name": "deadman_less", "kind": "position", "low": 0, "high": 1, "max_step": 1, "start": 0}],
        "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.4, -0.4, -0.4], "high": [0.4, 0.6, 0.4]},
        "deadman": True,
    },
}


huge = st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e30, -1e38, 3.4e38])
value = st.one_of(st.floats(-2, 2), st.sampled_from([-5.0, 5.0, 0.0]), st.floats(-0.05, 0.05))
good_values = st.lists(value, min_size=4, max_size=4)
bad_values = st.one_of(
    st.lists(st.one_of(value, huge), min_size=4, max_size=4), st.lists(value, max_size=6), st.just(["x"] * 4)
)
# Commands: asked again and again, so that speeds build up; ages that are fine, too old, or in the future.
command = st.one_of(
    st.none(),
    st.tuples(good_values, st.sampled_from(["policy", "recovery", "correction", "hold"]), st.just(0.0)),
    st.tuples(st.one_of(good_values, bad_values), st.just("policy"), st.sampled_from([0.0, 0.2, 5.0, -5.0, math.nan])),
    st.tuples(good_values, st.just("intruder"), st.just(0.0)),
)
gap = st.one_of(
    st.just(TICK),
    st.floats(0.03, 0.08),
    st.sampled_from([0.0, 0.002, 0.09, 0.12, 0.4, 30.0, 1e6, -0.01, -5.0]),
)
observation = st.one_of(
    st.just("fresh"), st.just("fresh"), st.sampled_from(["none", "old", "future", "nan", "small", "outside"])
)
event = st.one_of(st.just("none"), st.just("none"), st.sampled_from(["stop", "reset", "reset", "press", "release"]))
tick = st.tuples(gap, command, observation, event, st.integers(1, 8))


class Robot:
    """Follows what is sent, exactly and at once: positions jump there, velocities move x, y, z."""

    def __init__(self, config: SafetyConfig) -> None:
        self.config, self.state = config, np.zeros(4)

    def obey(self, sent: np.ndarray, seconds: float) -> None:
        for i, limits in enumerate(self.config.dimensions[:3]):
            self.state[i] = sent[i] if limits.kind == "position" else self.state[i] + sent[i] * seconds


class World:
    """A supervisor, its clock, the robot, and the checker that watches them."""

    def __init__(self, name: str) -> None:
        self.config = SafetyConfig.model_validate({"control_hz": HZ, **CONFIGS[name]})
        self.now = 1000.0
        self.supervisor = Supervisor(self.config, lambda: self.now)
        self.robot = Robot(self.config)
        self.checker = Checker(self.config, np.array([d.start or 0.0 for d in self.config.dimensions]))
        self.was_stopped = False
        self.observed = -math.inf

    def put(self, place: list[float]) -> None:
        """Move the robot there by hand."""
        self.robot.state[:3] = place
        is_position = [d.kind == "position" for d in self.config.dimensions]
        self.checker = Checker(self.config, np.where(is_position, [*place, self.checker.last[3]], 0.0))

    def run(self, gap: float, command: Any, seen: str, event: str) -> SentCommand:
        self.now += gap
        if gap < 0:
            self.observed = -math.inf
        self.tell(event)
        self.show(seen)
        asked = None
        if command is not None:
            values, source, age = command
            asked = Command(values, source, self.now - age)
        sent = self.supervisor.filter(asked)
        assert sent.mode == self.supervisor.state.mode
        self.checker.see(self.now, sent)
        if sent.values is not None:
            self.robot.obey(sent.values, max(0.0, min(gap, TICK)))
        assert not (self.was_stopped and sent.mode != "stopped"), "a stop stays until a reset"
        if sent.mode == "running":
            assert self.now - self.observed <= self.config.observation_timeout
        self.was_stopped = sent.mode == "stopped"
        return sent

    def tell(self, event: str) -> None:
        if event == "stop":
            self.supervisor.stop("test")
            self.was_stopped = True
        elif event == "reset":
            self.supervisor.reset("tester")
            self.was_stopped = False
        elif event in ("press", "release"):
            self.supervisor.deadman(event == "press")

    def show(self, seen: str) -> None:
        state, stamp = self.robot.state.astype(np.float32), self.now
        if seen == "none":
            return
        if seen == "old":
            stamp -= 2.0
        elif seen == "future":
            stamp += 2.0
        elif seen == "nan":
            state[1] = np.nan
        elif seen == "small":
            state = state[:1]
        elif seen == "outside":
            state[:3] = 7.0
        if seen in ("fresh", "outside"):
            self.observed = stamp
        self.supervisor.observe(RobotObservation({}, state, "do it", stamp))


def keeps_the_limits(name: str, data: list[Any]) -> None:
    world = World(name)
    world.tell("press")
    for gap, command, seen, event, repeats in data:
        for k in range(repeats):
            world.run(gap if k == 0 else TICK, command, seen, event if k == 0 else "press")


UP = ([0.0, 0.0, 1.0, 0.0], "policy", 0.0)
CUT = [(None, "fresh", "none", 1), (UP, "fresh", "none", 2), (None, "fresh", "stop", 1), (None, "outside", "none", 2)]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=30, deadline=None)
@given(data=st.lists(tick, min_size=1, max_size=25))
@example(data=[(TICK, *each) for each in CUT])  # stopped, then cut by the workspace, harder than a step
def test_everything_sent_keeps_the_limits(name: str, data: list[Any]) -> None:
    keeps_the_limits(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=1000, deadline=None)
@given(data=st.lists(tick, min_size=1, max_size=60))
def test_everything_sent_keeps_the_limits_in_long_runs(name: str, data: list[Any]) -> None:
    keeps_the_limits(name, data)


@settings(max_examples=30, deadline=None)
@given(
    targets=st.lists(st.tuples(good_values, st.floats(0.02, 0.09), st.integers(1, 12)), min_size=1, max_size=12),
)
def test_the_end_effector_stays_in_its_box(targets: list[Any]) -> None:
    world = World("twist")
    reach = 0.5 + 1e-6
    for values, gap, repeats in targets:
        for _ in range(repeats):
            world.run(gap, (values, "policy", 0.0), "fresh", "none")
            assert (np.abs(world.robot.state[:3]) <= reach).all()


place = st.lists(st.floats(-0.09, 0.25), min_size=3, max_size=3)  # within all limits


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=40, deadline=None)
@given(data=st.lists(tick, max_size=20), begins=place, moved=place)
def test_stop_and_reset_work_from_every_state(
    name: str, data: list[Any], begins: list[float], moved: list[float]
) -> None:
    """Whatever was before: a stop brings it to rest in time, and a person's reset lets it run and move again."""
    world = World(name)
    world.put([2 * x if "twist" in name else x for x in begins])
    world.tell("press")
    for gap, command, seen, event, repeats in data:
        for k in range(repeats):
            world.run(gap if k == 0 else TICK, command, seen, event if k == 0 else "press")
    world.tell("stop")
    for _ in range(math.ceil(world.config.stopping_time() / TICK) + 2):
        world.run(TICK, None, "fresh", "press")
    assert world.supervisor.is_still
    world.put(moved)  # by hand
    world.tell("reset")
    rest = [x if d.kind == "position" else 0.0 for x, d in zip([*moved, 0.05], world.config.dimensions, strict=True)]
    modes = [world.run(TICK, (rest, "policy", 0.0), "fresh", "press").mode for _ in range(3)]
    assert modes[-1] == "running", world.supervisor.state.reason
    towards = np.where(np.array(moved) > 0.08, -1.0, 1.0)  # the middle, about
    goal = [*(rest[:3] + 0.05 * towards), rest[3]]
    for _ in range(10):
        assert world.run(TICK, (goal, "policy", 0.0), "fresh", "press").mode == "running"
    assert ((world.robot.state[:3] - moved) * towards > 0.001).all()
