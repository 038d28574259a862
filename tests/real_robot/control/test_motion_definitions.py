"""The motion check against its definitions, number by number, on motions drawn at random, sound and faulty.

`Expected` says in plain loops what docs/safety.md and the class say. Small faults (`scripts/mutant_draw.py`, every
place) that these tests leave in `control/motion.py`, and why nobody can see them:

- `self._commands[0]` by another of them: a contract has numbers of one kind there.
- What is counted from 0 counted from 1, and "long ago" by longer ago: differences alone are used.
- The most that a value may last, 1 s by 1.5 s: after a second without one everything is forgotten.
- `>` by `>=` and `<` by `<=` (eight times): numbers that meet a limit to the last bit alone differ.
- The last axis of an array of two by its number; the least divisor, of a path that is zero.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_motion import CONTRACTS, FIFTY_HERTZ

from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.motion import VelocityFollowing
from real_robot.types import RobotObservation

WINDOW, ENOUGH, GAIN, DELAY = 0.8, 0.03, 2.5, 0.1


class Expected:
    """One robot: every value that was sent, every place that was seen."""

    def __init__(self, config: SafetyConfig) -> None:
        box, checks = config.workspace, config.checks
        assert box is not None and box.commands is not None
        self.columns, self.unit = list(box.commands), box.meters_per_unit
        self.tick, self.tolerance, self.margin = 1 / config.control_hz, checks.motion_tolerance, checks.motion_margin
        self.most_lag, self.second = math.ceil(checks.following_lag / self.tick), math.ceil(1 / self.tick)
        self.windows = sorted({int(x) for x in np.geomspace(1, math.ceil(WINDOW / self.tick), 10)})
        self.sent: list[tuple[float, np.ndarray]] = []
        self.forgotten = 0  # values that count as zero, before those in `sent`
        self.seen: list[tuple[int, np.ndarray]] = []
        self.unsent, self.blocked_at = 0, -2 * self.second
        self.astray: str | None = None
        self.forget_robot()

    def forget_robot(self) -> None:
        self.gain, self.delay = GAIN, DELAY
        self.lag = min(self.most_lag, math.ceil(2 * DELAY / self.tick))

    @property
    def count(self) -> int:
        return self.forgotten + len(self.sent)

    def restart(self) -> None:
        self.forgotten, self.sent, self.seen = self.count, [], []
        if self.astray:
            self.forget_robot()
        self.astray = None

    def remember(self, values: np.ndarray, now: float) -> None:
        if self.sent and now - self.sent[-1][0] > 1.0:
            self.restart()
        self.sent.append((now, values[self.columns] * self.unit))
        self.unsent = 0
        while len(self.sent) > 2 * (self.second + self.most_lag):
            self.sent.pop(0)
            self.forgotten += 1

    def paths(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Where the remembered values lead, if each lasts a tick, and if each lasts until the next."""
        places: tuple[list[np.ndarray], list[np.ndarray]] = ([np.zeros(3)], [np.zeros(3)])
        for i, (now, speed) in enumerate(self.sent):
            lasts = self.sent[i + 1][0] - now if i + 1 < len(self.sent) else 0.0
            places[0].append(places[0][-1] + speed * self.tick)
            places[1].append(places[1][-1] + speed * min(max(lasts, self.tick), 1.0))
        return places

    def way(self, path: list[np.ndarray], begin: int, end: int) -> np.ndarray:
        first, last = max(0, begin - self.forgotten), max(0, end - self.forgotten)
        return path[last] - path[first]

    def trouble(self, place: np.ndarray, has_sent: bool) -> str | None:
        self.unsent += 1
        if not has_sent or not self.sent or self.unsent > 3:
            return self.astray
        self.seen = [*self.seen, (self.count, place)][-self.second - 1 :]
        paths = self.paths()
        if self.gain == GAIN:
            self.identify(paths[0])
        return self.astray or self.compare(paths)

    def compare(self, paths: tuple[list[np.ndarray], list[np.ndarray]]) -> str | None:
        worst, found = 0.0, None
        newest, here = self.seen[-1]
        for window in [w for w in self.windows if w < len(self.seen)]:
            number, there = self.seen[-1 - window]
            told = [
                self.way(path, number - lag - first, newest - lag - last)
                for path in paths
                for lag in range(self.lag + 1)
                for last, first in ((0, 0), (0, 1), (1, 0))
            ]
            low, high = np.min(told, axis=0), np.max(told, axis=0)
            if max(*-low, *high) <= self.margin / 10:
                continue  # nothing was sent: a person moves it
            for axis in range(3):
                slow, fast, gone = low[axis], high[axis], (here - there)[axis]
                least = (slow / self.tolerance if slow > 0 else slow * self.tolerance) - self.margin
                most = (fast * self.tolerance if fast > 0 else fast / self.tolerance) + self.margin
                wrong = max(least - gone, gone - most)
                if wrong > worst + 1e-12:
                    is_short = -self.margin < gone < slow or fast < gone < self.margin
                    worst, found = wrong, (gone, slow, fast, axis, is_short)
        if found is None:
            return None
        way, slow, fast, axis, is_short = found
        what = "blocked, or slower than told" if is_short else "told in another direction, axis or unit"
        text = (
            f"the end effector went {1000 * way:+.0f} mm along {'xyz'[axis]} where it was sent {1000 * slow:+.0f} to "
            f"{1000 * fast:+.0f} mm: it is {what} (checks.motion_tolerance, motion_margin)"
        )
        if is_short:
            self.blocked_at = self.count
        elif self.count - self.blocked_at > self.second:
            self.astray = text
        return text

    def identify(self, path: list[np.ndarray]) -> None:
        extent = np.linalg.norm(np.max(path, axis=0) - np.min(path, axis=0))
        if len(self.seen) <= self.second - 1 or extent < ENOUGH:
            return
        first, start = self.seen[0]
        moved, fits = [place - start for _, place in self.seen], []
        for lag in range(self.most_lag + 1):
            told = [self.way(path, first - lag, number - lag) for number, _ in self.seen]
            square = sum(t @ t for t in told)
            gain = sum(t @ m for t, m in zip(told, moved, strict=True)) / square if square > 1e-12 else 0.0
            fits.append((sum((m - gain * t) @ (m - gain * t) for t, m in zip(told, moved, strict=True)), lag, gain))
        error, lag, gain = min(fits)
        if error < 0.1 * sum(m @ m for m in moved):
            self.lag, self.delay = min(self.most_lag, 2 * lag + 1), lag * self.tick
            self.gain = min(max(gain, 1.0), 0.99 * GAIN)


def told_as(text: str | None) -> str | None:
    """Without the sign of what is zero but for rounding."""
    return text and text.replace(" -0 ", " +0 ")


def config_of(contract: str, **checks: float) -> SafetyConfig:
    own = contract == "fifty_hertz"
    safety = SafetyConfig.model_validate(FIFTY_HERTZ) if own else load_contract(contract).safety
    return safety.model_copy(update={"checks": safety.checks.model_copy(update=checks)})


@pytest.mark.parametrize("contract", CONTRACTS[1:])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_told_and_found_is_as_defined(contract: str, seed: int) -> None:
    """Stretches of motion, each with a lag, a wiring, and a rhythm of sending and seeing of its own."""
    r = np.random.default_rng(seed)
    config = config_of(contract, following_lag=float(r.choice([0.3, 0.17, 0.06])), motion_margin=0.01)
    checked, expected, tick = VelocityFollowing(config), Expected(config), 1 / config.control_hz
    size, now, place = len(config.dimensions), 100.0, np.zeros(3)
    box = config.workspace
    assert box is not None
    fastest = 0.25 / expected.unit
    told = 0
    for _ in range(6):
        wiring, lag, alpha = np.eye(3), int(r.integers(0, 5)), r.uniform(0.2, 1)
        match r.integers(0, 8):
            case 0:
                wiring = wiring[r.permutation(3)]
            case 1:
                wiring = np.diag(r.uniform(-1.2, 1.2, 3))
            case 2 | 3:
                wiring = wiring * r.uniform(0.3, 3)
            case 4:
                wiring[r.integers(3)] = 0
            case _:
                pass
        waiting: list[np.ndarray] = [np.zeros(3)] * lag
        speed, asked = np.zeros(3), np.zeros(3)
        rests = r.choice([0.05, 0.05, 0.05, 0.7])  # share of observations without a value sent
        sends, stutters, scale = r.choice([1, 1, 1, 2, 4]), r.random() < 0.4, r.choice([0.01, 0.3, 1.0, 1.0])
        for _ in range(round(r.uniform(0.3, 2.5) / tick)):
            if r.random() < 3 * tick:
                asked = r.uniform(-1, 1, 3) * fastest * scale * (r.random(3) < 0.7)
            if r.random() > rests:
                for _ in range(sends):
                    values = np.zeros(size)
                    values[expected.columns] = asked
                    now += tick * (r.uniform(0.5, 1.8) if stutters else 1.0)
                    checked.remember(values, now)
                    expected.remember(values, now)
                    waiting.append(wiring @ asked * expected.unit)
                    speed = speed + alpha * (waiting.pop(0) - speed)
                    place = place + speed * tick
            state = np.zeros(9, np.float32)
            state[list(box.state)] = place + r.normal(0, 0.0003, 3)
            has_sent = r.random() > 0.01
            sees = checked.trouble(RobotObservation({}, state, "", now), np.zeros(size) if has_sent else None)
            should = expected.trouble(state[list(box.state)].astype(float), has_sent)
            told += should is not None
            assert told_as(sees) == told_as(should)
            assert (checked.gain, checked.delay) == pytest.approx((expected.gain, expected.delay))
        match r.integers(0, 4):
            case 0:
                checked.restart()
                expected.restart()
            case 1:
                now += r.choice([0.9, 1.1]) - tick
            case _:
                pass
    assert told, "there is something to tell"


def test_what_is_no_twist_or_not_to_be_judged_is_not() -> None:
    safety = load_contract("sim_robot").safety
    for config in (
        safety.model_copy(update={"workspace": None}),
        config_of("sim_robot", motion_tolerance=0.0),
        load_contract("sim_robot").safety.model_copy(
            update={"dimensions": tuple(d.model_copy(update={"kind": "position"}) for d in safety.dimensions)}
        ),
    ):
        check = VelocityFollowing(config)
        assert (check.gain, check.delay) == (1.0, 0.0)
        for k in range(40):
            check.remember(np.full(7, 0.5), k / 20)
            assert check.trouble(RobotObservation({}, np.zeros(8, np.float32), "", k / 20), np.zeros(7)) is None


def told_at_the_end(speed: float, moved: float) -> str | None:
    """A robot that is told to go along x at `speed` (m/s) for two windows, and goes `moved` meters in each."""
    config = config_of("franka_servo", motion_margin=0.01)
    check, tick, found = VelocityFollowing(config), 1 / config.control_hz, None
    box = config.workspace
    assert box is not None and box.commands is not None
    for k in range(2 * 16 + 1):
        values, state = np.zeros(len(config.dimensions)), np.zeros(9)
        values[box.commands[0]], state[box.state[0]] = speed / box.meters_per_unit, moved * k / 16
        check.remember(values, 100 + k * tick)
        found = check.trouble(RobotObservation({}, state, "", 100 + k * tick), values)
    return found


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("share", "says"), [(0.9995, "blocked, or slower"), (1.0005, "told in another direction")])
def test_one_that_goes_back_by_more_than_the_margin_is_astray(sign: int, share: float, says: str) -> None:
    found = told_at_the_end(sign * 0.1, -sign * share * 0.01)
    assert found is not None and says in found


@pytest.mark.parametrize(("share", "is_judged"), [(0.95, False), (1.05, True)])
def test_what_is_hardly_told_to_move_may_be_moved_by_hand(share: float, is_judged: bool) -> None:
    """A tenth of the margin in a window, and a tick more."""
    found = told_at_the_end(share * 0.001 / (17 / 20), 0.05)
    assert (found is not None) == is_judged
