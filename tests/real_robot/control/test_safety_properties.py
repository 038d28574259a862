"""For any commands, delays, losses and clock jumps, what the supervisor sends keeps its limits (hypothesis).

The checker knows nothing of how the supervisor works: it looks at the stream of sent values and the times alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.control.safety import SafetyConfig, SentCommand, Supervisor
from real_robot.types import Command, RobotObservation

HZ = 20.0
TICK = 1 / HZ

JOINT = {"kind": "position", "low": -1.0, "high": 1.5, "max_velocity": 0.8, "max_acceleration": 4.0}
TWIST = {"kind": "velocity", "low": -0.25, "high": 0.3, "max_acceleration": 1.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "joints": {
        "dimensions": [
            {"name": "j0", **JOINT, "state": 0},
            {"name": "j1", **JOINT, "state": 1, "max_step": 0.02, "stop_acceleration": 9.0},
            {"name": "j2", "kind": "position", "low": -0.1, "high": 0.3, "max_step": 0.05, "state": 2},
            {"name": "gripper", "kind": "position", "low": 0.0, "high": 0.0801, "max_velocity": 0.5, "start": 0.08},
        ],
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
    "pose": {
        "dimensions": [{"name": a, **JOINT, "state": i} for i, a in enumerate("xyz")]
        + [{"name": "deadman_less", "kind": "position", "low": 0, "high": 1, "max_step": 1, "start": 0}],
        "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.4, -0.4, -0.4], "high": [0.4, 0.6, 0.4]},
        "deadman": True,
    },
}


@dataclass
class Checker:
    """Looks at (time, sent) pairs, and remembers what limits need: the last values and speeds."""

    config: SafetyConfig
    last: np.ndarray  # at first where the robot begins
    time: float | None = None
    speed: np.ndarray = field(default_factory=lambda: np.zeros(4))
    shortest: float = TICK

    def see(self, now: float, sent: SentCommand) -> None:
        gap = TICK if self.time is None else now - self.time
        self.time = now
        if sent.values is None:
            return
        assert sent.values.dtype == np.float32
        values = sent.values.astype(np.float64)
        dt = min(max(gap, 0.0), TICK)
        for i, limits in enumerate(self.config.dimensions):
            low, high = limits.low, limits.high
            box = self.config.workspace
            if limits.kind == "position" and box is not None and box.commands is not None and i in box.commands:
                axis = box.commands.index(i)
                low, high = max(low, box.low[axis]), min(high, box.high[axis])
            assert low <= values[i] <= high, f"{limits.name}: {values[i]} outside {low}..{high}"
            rounding = 4e-7 * max(1.0, abs(values[i]))
            change = values[i] - self.last[i]
            acceleration = limits.max_acceleration
            if sent.mode != "running":
                acceleration = limits.stop_acceleration or acceleration
            if limits.kind == "velocity":
                allowed = min(acceleration * dt if acceleration else math.inf, limits.max_step or math.inf) + rounding
                # The workspace, and a clock that stands still, may brake harder: towards zero, not beyond.
                brakes = abs(values[i]) <= abs(self.last[i]) and values[i] * self.last[i] >= 0
                harder = "workspace" in sent.limited or (gap == 0 and sent.mode == "stopped")
                assert abs(change) <= allowed or (harder and brakes), f"{limits.name}: change {change} in {dt}"
                continue
            assert abs(change) <= (limits.max_step or math.inf) + rounding, f"{limits.name}: step {change}"
            fastest = min(limits.max_velocity or math.inf, (limits.max_step or math.inf) / TICK)
            assert abs(change) <= fastest * dt + rounding, f"{limits.name}: {change} in {dt} s"
            if dt == 0:
                continue
            speed = change / dt
            before = 0.0 if gap > 2 * TICK else self.speed[i]
            if acceleration is not None and dt > 0.001:
                allowed = acceleration * dt + 2 * rounding / dt + 2 * rounding / max(1e-3, self.shortest)
                assert abs(speed - before) <= allowed, f"{limits.name}: speed {before} -> {speed} in {dt} s"
            self.speed[i] = speed
        self.shortest = dt if dt > 0.001 else self.shortest
        self.last = values


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
event = st.one_of(
    st.just("none"), st.just("none"), st.sampled_from(["stop", "reset", "reset", "press", "release", "drop"])
)
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
        elif event == "drop":
            self.supervisor.drop_commands()

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


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=30, deadline=None)
@given(data=st.lists(tick, min_size=1, max_size=25))
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
