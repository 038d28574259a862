"""Forty hostile policies and twenty faults of the streams, on the shipped contracts and a robot that obeys.

Whatever comes, what is sent is finite, within its limits, and neither over-accelerated nor over-jerked, by a judge that
sees nothing but the sent values (`sent_checker`); and every silence ends in a hold within 0.4 s. On a clock of the
test's own, so that times are exact; `test_pedal_faults.py`, `test_ros_faults.py` and `test_faults.py` do the like with
real processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from representatives import slow_but_for
from sent_checker import Checker

from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.supervisor import SentCommand, Supervisor
from real_robot.types import Command, Deadman, RobotObservation

SECONDS = 8.0
QUIET = 0.4  # seconds from the beginning of a silence to the hold
CONTRACTS = ("so101", "franka_servo", "sim_robot")
Asked = tuple[Any, str, float]  # values, source, age


def shipped(name: str) -> SafetyConfig:
    return load_contract(name).safety


class World:
    """A contract's supervisor, and a robot that is, after each tick, where it was sent."""

    def __init__(self, config: SafetyConfig, seed: int = 0) -> None:
        self.config, self.rng = config, np.random.default_rng(seed)
        self.tick = 1 / config.control_hz
        self.now, self.step = 50.0, 0
        self.supervisor = Supervisor(config, lambda: self.now)
        self.low = np.array([d.low for d in config.dimensions])
        self.high = np.array([d.high for d in config.dimensions])
        self.state = self._first_state()
        self.checker = Checker(config, self._first_sent())
        self.sent: list[tuple[float, SentCommand]] = []
        self.picture = np.full((48, 64, 3), 90, np.uint8)

    def _first_state(self) -> np.ndarray:
        state, box = np.zeros(16, np.float32), self.config.workspace
        if box is not None:
            state[list(box.state)] = np.mean([box.low, box.high], axis=0)
        for limits in self.config.dimensions:
            if limits.state is not None:
                state[limits.state] = (limits.low + limits.high) / 2
        return state

    def _first_sent(self) -> np.ndarray:
        return np.array(
            [d.start or 0.0 if d.state is None else float(self.state[d.state]) for d in self.config.dimensions]
        )

    def see(self, **changes: Any) -> RobotObservation:
        """The observation of now; `changes` lie."""
        self.picture = self.picture.copy()
        self.picture[::8] = self.step % 251
        values = {"images": {"front": self.picture}, "state": self.state.copy(), "instruction": "", "stamp": self.now}
        return RobotObservation(**{**values, **changes})

    def go(self, asked: Asked | None, observation: RobotObservation | None, seconds: float) -> SentCommand:
        """One tick, that many seconds after the last one. The observation and the command are of this tick."""
        if observation is not None:
            self.supervisor.observe(observation)
        command = None if asked is None else Command(asked[0], asked[1], self.now - asked[2])
        sent = self.supervisor.filter(command)
        self.checker.see(self.now, sent)
        self.sent.append((self.now, sent))
        assert sent.values is not None or not self.sent[:-1] or self.sent[-2][1].values is None
        if sent.values is not None:
            self._obey(sent.values, min(seconds, self.tick))
        self.step += 1
        return sent

    def _obey(self, values: np.ndarray, seconds: float) -> None:
        box = self.config.workspace
        for i, limits in enumerate(self.config.dimensions):
            if limits.state is not None:
                self.state[limits.state] = values[i]
            elif limits.kind == "velocity" and box is not None and box.commands is not None and i in box.commands:
                number = box.state[box.commands.index(i)]
                self.state[number] += values[i] * box.meters_per_unit * seconds

    def last_motion(self, since: float) -> float:
        """Seconds from `since` to the end of the last motion that was sent."""
        moves = [
            now
            for (_, before), (now, sent) in zip(self.sent, self.sent[1:], strict=False)
            if before.values is not None and sent.values is not None and self._differs(before.values, sent.values)
        ]
        return max([now for now in moves if now > since], default=since) - since

    def _differs(self, before: np.ndarray, after: np.ndarray) -> bool:
        """Positions that change, velocities that are not zero."""
        is_velocity = np.array([d.kind == "velocity" for d in self.config.dimensions])
        return bool((after != before)[~is_velocity].any() or after[is_velocity].any())


Policy = Callable[[World, int], Asked | None]


def values(make: Callable[[World, int], Any], source: str = "policy", age: float = 0.0) -> Policy:
    return lambda world, k: (make(world, k), source, age)


def every(n: int, bad: Any) -> Policy:
    """A bad number in each n-th command; the others move to and fro."""

    def policy(world: World, k: int) -> Asked:
        numbers = span(world, k // 15 % 2)
        if k % n == 0:
            numbers[k // n % len(numbers)] = bad
        return numbers, "policy", 0.0

    return policy


def span(world: World, share: np.ndarray | float) -> np.ndarray:
    return (world.low + share * (world.high - world.low)).astype(np.float32)


def alternating(ticks: int, low: float = 0.0, high: float = 1.0) -> Policy:
    return values(lambda w, k: span(w, high if k // ticks % 2 else low))


def chirp(world: World, k: int) -> np.ndarray:
    t = k * world.tick
    return span(world, 0.5 + 0.5 * math.sin(2 * math.pi * (0.1 + t / 2) * t))


def on_and_off(world: World, k: int) -> Asked | None:
    return (span(world, 1.0), "policy", 0.0) if k // 3 % 2 else None


def holding_between(world: World, k: int) -> Asked:
    return span(world, float(k // 4 % 2)), ("policy", "policy", "hold")[k % 3], 0.0


POLICIES: dict[str, Policy] = {
    "NaN always": every(1, math.nan),
    "NaN every second": every(2, math.nan),
    "NaN every seventh": every(7, math.nan),
    "NaN every twentieth": every(20, math.nan),
    "infinite": every(5, math.inf),
    "minus infinite": every(9, -math.inf),
    "greater than float32": values(lambda w, k: [1e300] * len(w.low)),
    "greatest float32": values(lambda w, k: np.full(len(w.low), 3.4e38, np.float32)),
    "least float32": values(lambda w, k: np.full(len(w.low), -3.4e38, np.float32)),
    "denormal": values(lambda w, k: np.full(len(w.low), 1e-45, np.float32)),
    "too few": values(lambda w, k: np.zeros(len(w.low) - 1)),
    "too many": values(lambda w, k: np.zeros(len(w.low) + 1)),
    "a matrix": values(lambda w, k: np.zeros((1, len(w.low)))),
    "empty": values(lambda w, k: np.zeros(0)),
    "None": values(lambda w, k: None),
    "words": values(lambda w, k: ["up"] * len(w.low)),
    "complex": values(lambda w, k: np.full(len(w.low), 1j)),
    "objects": values(lambda w, k: [object()] * len(w.low)),
    "huge integers": values(lambda w, k: [10**400] * len(w.low)),
    "upper limits": values(lambda w, k: span(w, 1.0)),
    "lower limits": values(lambda w, k: span(w, 0.0)),
    "far beyond": values(lambda w, k: span(w, 1000.0 if k // 20 % 2 else -1000.0)),
    "alternates at each tick": alternating(1),
    "alternates at each second tick": alternating(2),
    "alternates at each third tick": alternating(3),
    "alternates at each seventh tick": alternating(7),
    "alternates a little": alternating(2, 0.49, 0.51),
    "alternates at a limit": alternating(5, 0.97, 1.0),
    "alternates, from half a second to half": alternating(10),
    "noise": values(lambda w, k: span(w, w.rng.uniform(-0.5, 1.5, len(w.low)))),
    "a walk": values(lambda w, k: span(w, np.cumsum(w.rng.normal(0, 0.2, (9, len(w.low))), 0)[-1])),
    "one number at a time": values(lambda w, k: span(w, np.eye(len(w.low))[k // 5 % len(w.low)])),
    "a chirp": values(chirp),
    "bursts with silence": on_and_off,
    "holds between": holding_between,
    "from the past": values(lambda w, k: span(w, 1.0), age=30.0),
    "from the future": values(lambda w, k: span(w, 1.0), age=-30.0),
    "without a time": values(lambda w, k: span(w, 1.0), age=math.nan),
    "from a stranger": values(lambda w, k: span(w, 1.0), source="intruder"),
    "under another's name": values(lambda w, k: span(w, float(k % 2)), source="recovery"),
}


def in_turn(names: Iterable[str]) -> list[Any]:
    """Each name with each contract; all but one contract for each, in turn, marked slow."""
    fast = [(name, CONTRACTS[i % len(CONTRACTS)]) for i, name in enumerate(names)]
    return slow_but_for(fast, itertools.product(names, CONTRACTS))


@pytest.mark.parametrize(("name", "contract"), in_turn(POLICIES))
def test_a_hostile_policy(name: str, contract: str) -> None:
    world = World(shipped(contract))
    gaps = np.random.default_rng(1).choice([1.0, 1.0, 1.0, 0.2, 0.9, 1.3, 1.9, 3.0], 1000)
    resets = 0
    while world.now < 50 + SECONDS:
        seconds = gaps[world.step % len(gaps)] * world.tick
        world.now += seconds
        sent = world.go(POLICIES[name](world, world.step), world.see(), seconds)
        if sent.mode == "stopped" and world.supervisor.is_still and resets < 5:
            resets += 1  # somebody who does not give up
            world.supervisor.reset("tester")
    assert len(world.sent) > 100
    if contract == "sim_robot":
        return  # it has no limits of acceleration and jerk
    assert world.checker.num_hard == 0, "not even at the workspace's sides"
    if name.startswith("alternates"):
        assert world.checker.jerk.max() > 0.9, "jerk was what limited it, else nothing was tested"


def test_there_are_as_many_as_promised() -> None:
    assert len(POLICIES) == 40 and len(FAULTS) == 20


def steady(world: World) -> Asked:
    """A policy that always wants to move."""
    return span(world, 1.0 if world.step // 30 % 2 else 0.0), "policy", 0.0


class Stream:
    """What reaches the supervisor at a tick: an observation and a command, either may be missing."""

    def __init__(self, observation: Any = "good", command: Any = "good", silent: bool = True) -> None:
        self.observation, self.command, self.silent = observation, command, silent

    def at(self, world: World) -> tuple[Asked | None, RobotObservation | None]:
        """What comes now."""
        seen = world.see() if self.observation == "good" else self.observation(world)
        asked = steady(world) if self.command == "good" else self.command(world)
        return asked, seen


def nothing(world: World) -> None:
    return None


def seen_with(**changes: Callable[[World], Any]) -> Callable[[World], RobotObservation]:
    return lambda world: world.see(**{name: make(world) for name, make in changes.items()})


def one_number(value: float) -> Callable[[World], np.ndarray]:
    """The state, its first number replaced."""
    return lambda w: np.where(np.arange(len(w.state)) == 0, np.float32(value), w.state)


def seldom(n: int) -> Callable[[World], RobotObservation | None]:
    return lambda world: world.see() if world.step % n == 0 else None


FAULTS: dict[str, Stream] = {
    "no observations": Stream(nothing),
    "observations of before": Stream(seen_with(stamp=lambda w: 50.0)),
    "observations of an hour ago": Stream(seen_with(stamp=lambda w: w.now - 3600)),
    "observations of the future": Stream(seen_with(stamp=lambda w: w.now + 3600)),
    "observations without a time": Stream(seen_with(stamp=lambda w: math.nan)),
    "observations a second late": Stream(seen_with(stamp=lambda w: w.now - 1.0)),
    "a NaN in the state": Stream(seen_with(state=one_number(math.nan))),
    "an infinite state": Stream(seen_with(state=one_number(math.inf))),
    "an empty state": Stream(seen_with(state=lambda w: np.zeros(0, np.float32))),
    "a state of words": Stream(seen_with(state=lambda w: np.array(["a"] * 16))),
    "a state that jumped": Stream(seen_with(state=one_number(77.0))),
    "a black camera": Stream(seen_with(images=lambda w: {"front": np.zeros((48, 64, 3), np.uint8)})),
    "a camera of another size": Stream(seen_with(images=lambda w: {"front": np.full((24, 32, 3), 90, np.uint8)})),
    "no commands": Stream(command=nothing),
    "the same command again": Stream(command=lambda w: (span(w, 1.0), "policy", w.now - 52.0)),
    "refused commands": Stream(command=lambda w: ([math.nan] * len(w.low), "policy", 0.0)),
    "neither": Stream(nothing, nothing),
    "one observation a second": Stream(seldom(20), silent=False),
    "every second observation": Stream(seldom(2), silent=False),
    "observations out of order": Stream(seen_with(stamp=lambda w: w.now - 0.05 * (w.step % 3)), silent=False),
}


@pytest.mark.parametrize(("name", "contract"), in_turn(FAULTS))
def test_a_fault_of_a_stream(name: str, contract: str) -> None:
    world, fault = World(shipped(contract)), FAULTS[name]
    first, last = 52.5, 56.0  # it lasts for so long
    while world.now < 50 + SECONDS:
        world.now += world.tick
        asked, seen = fault.at(world) if first <= world.now < last else (steady(world), world.see())
        world.go(asked, seen, world.tick)
    assert world.sent[int(2.0 / world.tick)][1].mode == "running", "before the fault"
    if fault.silent:
        held = [now for now, sent in world.sent if sent.mode != "running" and now >= first]
        assert held[0] - first <= QUIET, f"held after {held[0] - first:.3f} s"
        running = [now for now, sent in world.sent if sent.mode == "running" and first + QUIET < now < last]
        assert not running, "it stays held"
        braking = world.config.stopping_time()
        moved = [now for now, sent in world.sent if first <= now < last]
        during = [pair for pair in world.sent if pair[0] < last]
        world.sent = during
        assert world.last_motion(first) <= QUIET + braking and moved


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_pedal_that_falls_silent(contract: str) -> None:
    config = shipped(contract).model_copy(update={"deadman": True})
    world = World(config)
    last = Deadman(True, 0.0)
    while world.now < 56:
        world.now += world.tick
        last = Deadman(True, world.now) if world.now < 53 else last
        world.supervisor.deadman(*last)
        world.go(steady(world), world.see(), world.tick)
    held = next(now for now, sent in world.sent if sent.mode == "holding" and now > 53)
    assert held - 53 <= QUIET
    assert {sent.mode for now, sent in world.sent if now > held} == {"holding"}
