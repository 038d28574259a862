"""Velocities against measured motion: faulty robots are held in time, sound ones never, on exact clocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.supervisor import SentCommand, Supervisor
from real_robot.types import Command, RobotObservation
from sim.tabletop.env import TabletopConfig
from vla_rl.types import EpisodeSpec

CONTRACTS = ("sim_robot", "franka_servo", "fifty_hertz")
SLOW = {"sim_robot": 0.4}  # m/s at which a fault is to be seen, else 0.2: sim_robot has a wide margin and goes at 1 m/s
FIFTY_HERTZ: dict[str, Any] = {
    "control_hz": 50,
    "dimensions": [
        {"name": a, "kind": "velocity", "low": -0.25, "high": 0.25, "max_acceleration": 1.5, "stop_acceleration": 3}
        for a in "xyz"
    ],
    "workspace": {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.3, -0.3, 0.0], "high": [0.3, 0.3, 0.4]},
}


class Arm:
    """A twist-driven arm: dead time (ticks), a lag of first order (seconds), noise (m), and what is wrong with it.

    Attributes:
        wiring: (3, 3), what a velocity becomes. outside: how far it has been outside its box, m.
    """

    def __init__(self, contract: str, dead: int = 0, lag: float = 0.0, noise: float = 0.0005, seed: int = 0) -> None:
        own = contract == "fifty_hertz"
        self.config = SafetyConfig.model_validate(FIFTY_HERTZ) if own else load_contract(contract).safety
        assert self.config.workspace is not None and self.config.workspace.commands is not None
        self.box, self.commands = self.config.workspace, list(self.config.workspace.commands)
        self.rng, self.noise, self.lag = np.random.default_rng(seed), noise, lag
        self.tick, self.now = 1 / self.config.control_hz, 100.0
        self.low, self.high = np.array(self.box.low), np.array(self.box.high)
        self.place, self.speed, self.wiring = (self.low + self.high) / 2, np.zeros(3), np.eye(3)
        self.waiting = [np.zeros(3)] * round(dead / 20 / self.tick)
        self.fastest = np.array([self.config.dimensions[i].high for i in self.commands]) * self.box.meters_per_unit
        self.outside = 0.0
        self.supervisor = Supervisor(self.config, lambda: self.now)

    def go(self, speed: np.ndarray) -> SentCommand:
        """One tick, asked for (3,) m/s."""
        self.now += self.tick
        state = np.zeros(8, np.float32)
        state[list(self.box.state)] = self.place + self.rng.normal(0, self.noise, 3)
        self.supervisor.observe(RobotObservation({}, state, "", self.now))
        asked = np.zeros(len(self.config.dimensions), np.float32)
        asked[self.commands] = speed / self.box.meters_per_unit
        sent = self.supervisor.filter(Command(asked, "policy", self.now))
        values = np.zeros(3) if sent.values is None else sent.values[self.commands].astype(float)
        self.waiting.append(self.wiring @ values * self.box.meters_per_unit)
        share = 1 - np.exp(-self.tick / self.lag) if self.lag else 1.0
        self.speed = self.speed + share * (self.waiting.pop(0) - self.speed)
        self.place = self.place + self.speed * self.tick
        self.outside = max(self.outside, float(np.maximum(self.place - self.high, self.low - self.place).max()))
        return sent

    def held_after(self, speed: Callable[[float], np.ndarray], seconds: float) -> float | None:
        """Seconds until the check holds it; None: it does not."""
        began, held = self.now, None
        for _ in range(round(seconds / self.tick)):
            if "motion" in self.go(speed(self.now - began)).limited and held is None:
                held = self.now - began - self.tick
        return held


def along(axis: int, speed: float) -> Callable[[float], np.ndarray]:
    return lambda t: np.eye(3)[axis] * speed


def to_and_fro(t: float) -> np.ndarray:
    return np.array([0.15 * np.sin(2 * t), 0.15 * np.cos(1.7 * t), 0.0])


FAULTS = {
    "blocked axis": np.diag([1.0, 0, 1]),
    "nothing moves": np.zeros((3, 3)),
    "inverted axis": np.diag([1.0, -1, 1]),
    "swapped axes": np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "ten times too fast": 10 * np.eye(3),
}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_known", [False, True], ids=["from the start", "after a while"])
@pytest.mark.parametrize(("dead", "lag"), [(0, 0.0), (1, 0.05)], ids=["at once", "late"])
def test_a_fault_is_held_within_half_a_second(contract: str, fault: str, is_known: bool, dead: int, lag: float) -> None:
    arm = Arm(contract, dead, lag)
    if is_known:
        assert arm.held_after(to_and_fro, 3.0) is None
        assert arm.held_after(along(0, 0.0), 0.5) is None
        arm.place = (arm.low + arm.high) / 2
        arm.supervisor.begin()
    arm.wiring = FAULTS[fault]
    speed = SLOW.get(contract, 0.2) if fault != "ten times too fast" else 0.2  # inside its box until it is held
    held = arm.held_after(along(1, speed), 4.0)
    assert held is not None and held <= 0.5 + 1e-6, arm.supervisor.state
    assert arm.supervisor.state.mode == "stopped", "it lasts"
    reason = r"went .* mm along [xyz] where it was sent .* mm: it is|outside the workspace .* by more than 0.05 m"
    assert re.search(reason, arm.supervisor.state.reason)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("axis", "sign"), [(0, 1), (1, -1), (2, 1), (2, -1)])
@pytest.mark.parametrize("distance", [0.3, 0.1, 0.05, 0.02])
def test_one_that_is_two_and_a_half_times_too_fast_stays_near_its_box(
    contract: str, axis: int, sign: int, distance: float
) -> None:
    """Asked at its highest speed towards a side, from that far away."""
    arm = Arm(contract, dead=1)
    arm.wiring = 2.5 * np.eye(3)
    side = arm.high if sign > 0 else arm.low
    arm.place[axis] = max(arm.low[axis], min(arm.high[axis], side[axis] - sign * distance))
    arm.held_after(along(axis, sign * arm.fastest[axis]), 3.0)
    assert arm.outside < 0.02


@pytest.mark.parametrize("contract", CONTRACTS)
def test_after_a_reset_a_mended_robot_goes_on(contract: str) -> None:
    arm = Arm(contract)
    arm.wiring = FAULTS["inverted axis"]
    arm.held_after(along(1, SLOW.get(contract, 0.2)), 4.0)
    assert arm.supervisor.state.mode == "stopped"
    arm.place, arm.wiring = (arm.low + arm.high) / 2, np.eye(3)
    arm.supervisor.reset("anna")
    assert arm.held_after(to_and_fro, 3.0) is None and arm.supervisor.state.mode == "running"


def test_a_robot_that_is_moved_by_hand_is_not_held() -> None:
    arm = Arm("franka_servo")
    for k in range(100):
        arm.place[0] += 0.002 if k % 2 else 0.0
        assert "motion" not in arm.go(np.zeros(3)).limited


def wanders(contract: str, dead: int, lag: float, seconds: float) -> int:
    """Ticks held, of a sound robot that goes from place to place, the sides of its box among them."""
    arm, goal, share, held = Arm(contract, dead, lag), None, 1.0, 0
    for _ in range(round(seconds / arm.tick)):
        if goal is None or np.abs(goal - arm.place).max() < 0.02 or arm.rng.random() < 0.01:
            goal, share = arm.low + arm.rng.random(3) * (arm.high - arm.low), arm.rng.uniform(0.2, 1)
        held += "motion" in arm.go(np.clip(8 * (goal - arm.place), -arm.fastest, arm.fastest) * share).limited
    return held


LAGS = [(0, 0.0), (1, 0.05), (0, 0.15), (2, 0.1)]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("dead", "lag"), LAGS)
def test_a_sound_robot_is_never_held(contract: str, dead: int, lag: float) -> None:
    assert wanders(contract, dead, lag, 30.0) == 0


HOUR = [pytest.mark.slow, pytest.mark.timeout(3600)]  # on an exact clock: some minutes, more on a busy machine


@pytest.mark.parametrize("contract", [pytest.param(contract, marks=HOUR) for contract in CONTRACTS])
def test_a_sound_robot_is_not_held_in_an_hour(contract: str) -> None:
    assert wanders(contract, 1, 0.05, 3600.0) == 0


def expert_holds(task: str, minutes: float, noise: float = 0.0) -> int:
    """Ticks held of the tabletop's expert, which grips and pushes blocks, through sim_robot's contract.

    With noise (standard deviation of actions in [-1, 1], held for two steps) it presses on blocks, and springs back.
    """
    env, now, held, rng = TabletopConfig().make(), 100.0, 0, np.random.default_rng(0)
    supervisor = Supervisor(load_contract("sim_robot").safety, lambda: now)
    for episode in range(round(minutes * 12)):
        env.reset(EpisodeSpec(task, "train", episode))
        supervisor.begin()
        error = np.zeros(7)
        for step in range(100):
            now += 0.05
            supervisor.observe(RobotObservation({}, env.proprioception(), "", now))
            error = rng.normal(0, noise, 7) if step % 2 == 0 else error
            action = np.clip(env.expert_action() + error, -1, 1).astype(np.float32)
            sent = supervisor.filter(Command(action, "policy", now))
            held += "motion" in sent.limited
            if sent.values is not None:
                env.apply(np.clip(sent.values, -1, 1))
    return held


@pytest.mark.parametrize("task", ["push_to_zone", "stack", "pick_place"])
def test_contacts_of_a_good_policy_are_no_fault(task: str) -> None:
    assert expert_holds(task, 1.0) == 0


@pytest.mark.parametrize("task", ["push_to_zone", "stack"])
def test_a_gripper_that_is_pressed_on_a_block_and_springs_back_is_no_fault(task: str) -> None:
    """The commanded pose is ahead of a blocked gripper by up to the environment's LEASH."""
    assert expert_holds(task, 3.0, noise=0.3) == 0


@pytest.mark.parametrize("task", [pytest.param(task, marks=HOUR) for task in ("push_to_zone", "stack", "pick_place")])
def test_contacts_of_a_good_policy_are_no_fault_in_an_hour(task: str) -> None:
    """Twenty minutes of each task."""
    assert expert_holds(task, 20.0) == 0
