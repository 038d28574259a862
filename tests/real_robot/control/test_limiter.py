"""The limiter against its definitions, from any state that can be planted, on a clock of the test's own.

`Expected` says what one number does in one tick, from the page docs/safety.md: the highest speeds are sought by
bisection where the limiter has formulas. Powers of two make equalities exact: a limit that is just reached is kept.

Small faults (`scripts/mutant_draw.py`, every place and not a draw) that these tests leave in the module, and why
nobody can see them:

- `dims[box.commands[0]]` by another of its numbers, twice: a contract has numbers of one kind there.
- `strict=True` of two `zip`: the lengths are equal by construction.
- -1, which marks what is not measured, by -2 (below 0 is all that is asked), and as the least of all indices.
- 0.0 by 1.0 as the change of a speed without a limit of its jerk: it is divided by an infinite jerk.
- The memory of 256 ticks by 257: `room` looks back less far, or as far as the time that it is made for.
- `>` by `>=` where two equal ways brake (as long either way), where a rounding tolerance of 1e-9 of a range is met to
  the last bit (twice), and in `_is_at` (a name): equal numbers alone differ.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from real_robot.contract.safety import DimensionLimits, SafetyConfig
from real_robot.control.jerk import TOLERANCE, Bounds, Motion1D
from real_robot.control.limiter import Limiter, Room, WorkspaceGuard, _inside, braking_speed
from real_robot.types import RobotObservation

HZ = 16.0
TICK = 1 / HZ
POSITION = {"kind": "position", "low": -1.0, "high": 1.5}
SPEED = {"kind": "velocity", "low": -0.25, "high": 0.5}
NUMBERS: dict[str, dict[str, Any]] = {
    "position": {**POSITION, "max_velocity": 0.75, "start": 0.0},
    "braked position": {**POSITION, "max_velocity": 0.75, "max_acceleration": 4.0, "stop_acceleration": 8.0},
    "stepped position": {**POSITION, "max_velocity": 9.0, "max_step": 0.0625, "max_acceleration": 3.0},
    "smooth position": {**POSITION, "max_velocity": 0.75, "max_acceleration": 4.0, "max_jerk": 40.0},
    "smooth position, hard stops": {
        **{**POSITION, "max_step": 0.125, "max_acceleration": 4.0, "max_jerk": 40.0},
        **{"stop_acceleration": 9.0, "stop_jerk": 300.0},
    },
    "speed": SPEED,
    "braked speed": {**SPEED, "max_acceleration": 1.0, "stop_acceleration": 4.0},
    "stepped speed": {**SPEED, "max_acceleration": 1.0, "stop_acceleration": 4.0, "max_step": 0.0625 / 2},
    "speed of equal step": {**SPEED, "max_acceleration": 1.0, "max_step": 0.0625},
    "smooth speed": {**SPEED, "max_acceleration": 1.0, "max_jerk": 8.0},
    "smooth speed, hard stops": {
        **{**SPEED, "max_acceleration": 1.0, "max_jerk": 8.0, "stop_acceleration": 4.0, "stop_jerk": 64.0},
    },
    "smooth stepped speed": {**SPEED, "max_acceleration": 1.0, "max_jerk": 8.0, "max_step": 0.0625 / 4},
}
BOX = {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-0.5] * 3, "high": [0.5, 0.25, 1.0]}


def config(*numbers: dict[str, Any], hz: float = HZ, **options: Any) -> SafetyConfig:
    named = [{"name": f"n{i}", **number} for i, number in enumerate(numbers)]
    seen = [d if d["kind"] == "velocity" or "start" in d else {**d, "state": i} for i, d in enumerate(named)]
    return SafetyConfig.model_validate({"control_hz": hz, "dimensions": seen, **options})


def planted(limiter: Limiter, values: Any, moving: Any = 0.0, accelerating: Any = 0.0) -> Limiter:
    """A limiter in a state: speeds of positions, accelerations of speeds, accelerations of smooth positions."""
    like = np.zeros(len(limiter.names))
    limiter.restore((like + values, like + moving, like + accelerating))
    return limiter


class After(NamedTuple):
    value: float
    moving: float
    accelerating: float
    limited: set[str]


def highest(distance: float, rate: float, dt: float) -> float:
    """The highest speed that may last for `dt` and then brake at `rate`, by bisection."""
    low, high = 0.0, distance / dt
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * dt + middle * middle / (2 * rate) <= distance else (low, middle)
    return low


class Expected:
    """One number, one tick."""

    def __init__(self, limits: DimensionLimits) -> None:
        step = (limits.max_step or math.inf) / TICK
        usual, stop = limits.max_acceleration or math.inf, limits.stop_acceleration or limits.max_acceleration
        self.limits, self.low, self.high = limits, limits.low, limits.high
        self.fastest = min(limits.max_velocity or math.inf, step)
        self.usual, self.stop = usual, stop or math.inf
        self.jerk, self.stop_jerk = limits.max_jerk or math.inf, limits.stop_jerk or limits.max_jerk or math.inf
        if limits.kind == "velocity":
            self.changes = "step" if step <= usual else "acceleration"
            self.usual, self.stop = min(usual, step), min(self.stop, step)
        else:
            self.changes = "step" if step <= (limits.max_velocity or math.inf) else "velocity"

    def after(self, value: float, moving: float, accelerating: float, target: float | None, dt: float) -> After:
        rest = 0.0 if self.limits.kind == "velocity" else value
        asked = min(max(rest if target is None else target, self.low), self.high)
        limited = {"bounds"} if target is not None and asked != target else set()
        if self.limits.kind == "velocity":
            ways = self._smooth_speed if self.limits.max_jerk else self._speed
        else:
            ways = self._smooth_position if self.limits.max_jerk else self._position
        there = ways(value, moving, accelerating, asked, dt, target is None)
        return there._replace(limited=there.limited | limited)

    def _position(self, value: float, moving: float, _: float, asked: float, dt: float, brakes: bool) -> After:
        rate = self.stop if brakes else self.usual
        speed = chosen(asked - value, self.fastest, moving, rate, dt)
        names = {self.changes} if abs(asked - value) > self.fastest * dt else set()
        wanted = min(max((asked - value) / dt, -self.fastest), self.fastest)
        if abs(speed - wanted) > 1e-8 + 1e-5 * abs(wanted):
            names.add("acceleration")
        return After(min(max(value + speed * dt, self.low), self.high), speed, 0.0, names)

    def _smooth_position(self, *state: Any) -> After:
        value, moving, accelerating, asked, dt, brakes = state
        usual = Bounds(self.fastest, self.usual, self.jerk)
        here, names = Motion1D(value, moving, accelerating), set()
        if brakes or not usual.allows(here, self.low, self.high):
            there = Bounds(self.fastest, self.stop, self.stop_jerk).brake(here, dt)
            names = set() if brakes else {"braking"}
        else:
            there = usual.step(here, asked, dt)
            if abs(there.position - asked) > TOLERANCE * (self.high - self.low):
                fast, hard = abs(there.speed) > 0.999 * self.fastest, abs(there.acceleration) > 0.999 * self.usual
                names = {self.changes if fast else "acceleration" if hard else "jerk"}
        return After(min(max(there.position, self.low), self.high), there.speed, there.acceleration, names)

    def _speed(self, value: float, moving: float, _: float, asked: float, dt: float, brakes: bool) -> After:
        rate = self.stop if brakes else self.usual
        there = min(max(asked, value - rate * dt), value + rate * dt)
        return After(there, moving, 0.0, set() if there == asked else {self.changes})

    def _smooth_speed(self, value: float, moving: float, _: float, asked: float, dt: float, brakes: bool) -> After:
        slack = 1e-9 * (self.high - self.low)
        settles = value + math.copysign(moving * moving / (2 * self.jerk), moving)
        unfit = abs(moving) > self.usual or not self.low - slack <= settles <= self.high + slack
        fastest, jerk = (self.stop, self.stop_jerk) if unfit or brakes else (self.usual, self.jerk)
        goal = 0.0 if unfit else asked
        rate = chosen(goal - value, fastest, moving, jerk, dt)
        there = min(max(value + rate * dt, self.low), self.high)
        names = {"braking"} if unfit and not brakes else set()
        if abs(there - goal) <= slack:
            return After(goal, rate, 0.0, names)
        return After(there, rate, 0.0, names | {self.changes if abs(rate) > 0.999 * fastest else "jerk"})


def chosen(distance: float, fastest: float, before: float, rate: float, dt: float) -> float:
    """The highest speed from which it can stop in time, within reach of the one before."""
    fast = min(fastest, highest(abs(distance), rate, dt))
    return min(max(math.copysign(fast, distance), before - rate * dt), before + rate * dt)


def states(limits: DimensionLimits, count: int, seed: int) -> Any:
    """Values, speeds and accelerations within and somewhat beyond the limits; goals; lengths of the tick."""
    draw, expected = np.random.default_rng(seed), Expected(limits)
    for _ in range(count):
        value = draw.uniform(limits.low, limits.high) if draw.random() < 0.8 else draw.choice([limits.low, limits.high])
        if limits.kind == "position":
            moving = draw.uniform(-1, 1) * min(expected.fastest, 4.0)
            accelerating = draw.uniform(-1.2, 1.2) * expected.usual if limits.max_jerk else 0.0
            if draw.random() < 0.2:
                moving, accelerating = draw.choice([-1, 1]) * expected.fastest, 0.0
        else:
            top = draw.choice([expected.usual, 1.2 * expected.stop])
            moving, accelerating = draw.choice([draw.uniform(-1, 1) * top, expected.usual, 0.0]), 0.0
            moving = moving if limits.max_jerk else 0.0
        near = value + draw.uniform(-1, 1) * 10 ** draw.uniform(-4, 0)
        target = draw.choice([near, limits.low, limits.high, 9.0, -9.0, 0.0, value])
        yield value, moving, accelerating, None if draw.random() < 0.2 else target, TICK * draw.choice([1, 0.5, 0.01])


@pytest.mark.parametrize("name", NUMBERS)
def test_one_tick_from_any_state_is_what_the_limits_define(name: str) -> None:
    """Beside a number of each other kind, which stands: no number's limits act on another, nor are they named."""
    others = [SPEED, {**POSITION, "max_velocity": 1.0, "start": 0.5}, NUMBERS["smooth speed"], NUMBERS["braked speed"]]
    safety = config(NUMBERS[name], *others)
    limits, limiter = safety.dimensions[0], Limiter(safety)
    expected, seen = Expected(limits), set()
    for value, moving, accelerating, target, dt in states(limits, 700, seed=len(name)):
        planted(limiter, [value, 0, 0.5, 0, 0], [moving, 0, 0, 0, 0], [accelerating, 0, 0, 0, 0])
        sent, limited = limiter.move(None if target is None else np.array([target, 0, 0.5, 0, 0]), dt)
        there = expected.after(value, moving, accelerating, target, dt)
        seen |= limited
        state = f"from {value}, {moving}, {accelerating} to {target} in {dt}"
        assert limiter.values.tolist() == pytest.approx([there.value, 0, 0.5, 0, 0], rel=1e-9, abs=1e-12), state
        found = [float(part[0]) for part in limiter.snapshot()[1:]]
        assert found == pytest.approx(list(there[1:3]), rel=1e-7, abs=1e-9), state
        assert limited == there.limited, state
        assert sent[0] == pytest.approx(there.value, rel=1e-6, abs=1e-9) and limits.low <= sent[0] <= limits.high
    assert seen >= ({"bounds"} if name == "speed" else {"bounds", expected.changes}), "the draw reaches its limits"


def test_what_just_reaches_its_goal_is_not_limited() -> None:
    limiter = planted(Limiter(config(NUMBERS["position"])), 0.0)
    assert limiter.move(np.array([0.75 * TICK]), TICK)[1] == set(), "the whole way at the highest speed"
    smooth = Limiter(config(NUMBERS["smooth position"]))
    for value in (-0.5, 0.0, 0.5):
        for away, names in ((0.0, set()), (0.9 * TOLERANCE * 2.5, set()), (1.1 * TOLERANCE * 2.5, {"jerk"})):
            assert planted(smooth, value).move(np.array([value + away]), TICK)[1] == names, (value, away)


def test_braking_speed_is_the_highest_that_stops_in_time() -> None:
    for distance, rate, dt in [(0.3, 2.0, 0.05), (1e-4, 9.0, 0.0625), (5.0, 0.25, 0.01), (0.0, 1.0, 0.1)]:
        speed = float(braking_speed(distance, rate, dt))
        assert speed * dt + speed * speed / (2 * rate) == pytest.approx(distance) and speed >= 0
    assert braking_speed(0.5, math.inf, 0.0625) == 8.0


def test_what_is_sent_is_within_the_limits_to_the_last_bit() -> None:
    low, high = np.array([0.1, -0.3, 0.5, 0.7]), np.array([0.7, 0.1, 0.75, 0.9])
    low32, high32 = _inside(low, high)
    assert low32.dtype == high32.dtype == np.float32
    assert (low32 >= low).all() and (high32 <= high).all(), "never beyond, where the nearest float32 is"
    assert (np.nextafter(low32, np.float32(-9)) < low).all() and (np.nextafter(high32, np.float32(9)) > high).all()
    limiter = Limiter(config({**SPEED, "low": -0.3, "high": 0.1}))
    assert limiter.move(np.array([9.0]), TICK)[0][0] <= 0.1 and limiter.move(np.array([-9.0]), TICK)[0][0] >= -0.3


@pytest.mark.parametrize("name", NUMBERS)
def test_braking_ends_where_it_is_said_and_never_later(name: str) -> None:
    """From states that the limiter reaches by itself: the way to standstill, tick by tick, against `braking_way`."""
    limiter, draw = Limiter(config(NUMBERS[name])), np.random.default_rng(1)
    limiter.seed(np.zeros(1))
    is_speed, shares = NUMBERS[name]["kind"] == "velocity", []
    for _ in range(60):
        for target in draw.uniform(-1, 1.5, 3).repeat(draw.integers(1, 5)):
            limiter.move(np.array([target]), TICK)
        before, said, begins = limiter.snapshot(), float(limiter.braking_way[0]), float(limiter.values[0])
        way, ticks = begins * TICK if is_speed else 0.0, 0
        while not limiter.is_still:
            limiter.move(None, TICK)
            way, ticks = way + limiter.values[0] * TICK if is_speed else limiter.values[0] - begins, ticks + 1
            assert ticks < 200
        limiter.restore(before)
        turns = is_speed and before[0][0] * before[1][0] < 0  # through zero: it goes a little both ways
        assert abs(way) <= abs(said) + 1e-9 and (turns or way * said >= -1e-12), (before, way, said)
        shares += [way / said] if abs(said) > 0.01 else []
    assert not shares or np.mean(shares) > 0.3, "nor is it said to be much longer than it is"


def test_ways_of_braking_by_hand() -> None:
    numbers = [NUMBERS[n] for n in ("speed", "braked speed", "smooth speed", "smooth speed, hard stops")]
    numbers += [NUMBERS[n] for n in ("position", "braked position", "smooth position", "stepped speed")]
    limiter = Limiter(config(*numbers))
    values = [0.5, 0.5, -0.125, 0.25, 0.0, 0.0, 0.0, 0.5]
    planted(limiter, values, [0, 0, -0.5, 0.75, 0.5, -0.5, 0.5, 0])
    peak, hard = 0.125 + 0.5 * 0.5 / (2 * 8), 0.25 + 0.75 * 0.75 / (2 * 64)
    braking_at = 4.0 * 4.0 / 40  # change of speed while the smooth position's braking is built up
    top = min(4.0, math.sqrt(40 * 0.5))
    assert top == 4.0 and braking_at < 0.5, "the ramp, the full braking and the ramp"
    ways = [
        0.5 * TICK,
        0.5 * TICK + 0.5**2 / (2 * 4),
        -(peak * peak / 2 + peak * (TICK + (1 + 0.5) / 8)),  # first to its peak, then until it brakes fully
        hard * hard / (2 * 4) + hard * (TICK + (4 + 0.75) / 64),
        0.0,
        -(0.5**2) / (2 * 8),
        0.5 * (0.5 / 4 + 4 / 40) / 2,  # a symmetric way down: half of the speed for its whole time
        0.5 * TICK + 0.5**2 / (2 * 0.5),
    ]
    assert limiter.braking_way == pytest.approx(ways)
    planted(limiter, 0.0, [0, 0, 0.5, -0.75, 0, 0, 0, 0])
    assert limiter.braking_way[2] > 0 > limiter.braking_way[3], "it stands, and is about to move"
    planted(limiter, [0, 0, 0.25, 0, 0, 0, 0, 0], [0, 0, -0.5, 0, 0, 0, 0, 0])
    assert limiter.braking_way[2] == pytest.approx(0.25**2 / 2 + 0.25 * (TICK + 1.5 / 8)), "letting go takes no less"


def test_it_is_still_where_nothing_moves() -> None:
    def is_still(values: Any, moving: Any = 0.0, accelerating: Any = 0.0) -> bool:
        return planted(limiter, values, moving, accelerating).is_still

    limiter = Limiter(config(NUMBERS["smooth speed"], NUMBERS["smooth position"]))
    assert is_still([0, 0.5]) and not is_still([0.1, 0.5])
    assert not is_still([0, 0.5], [0, 0.1]) and not is_still([0, 0.5], [0.1, 0])
    assert not is_still([0, 0.5], 0, [0, 0.1]) and not is_still([0.1, 0.5], [0, 0.1], [0, 0.1])
    planted(limiter, [0.25, 0.5], [0.5, 0.5], [0, 0.5]).halt()
    assert limiter.values.tolist() == [0, 0.5] and limiter.snapshot()[1].tolist() == [0, 0.5], "speeds are zero at once"
    planted(limiter, [0.25, 0.5], [0.5, 0.5], [0, 0.5]).stand()
    assert [part.tolist() for part in limiter.snapshot()] == [[0.25, 0.5], [0, 0], [0, 0]]


def test_where_it_begins() -> None:
    joint, gripper = {**POSITION, "max_velocity": 0.5}, {**POSITION, "max_velocity": 0.5, "start": 1.0}
    limiter = Limiter(config(joint, gripper, SPEED, {**joint, "max_step": 1 / 64}))
    assert limiter.state_size == 4 and Limiter(config(gripper)).state_size == 0
    assert not limiter.is_known and limiter.values[1:3].tolist() == [1, 0]
    planted(limiter, [0, 1, 0.25, 0], [0.5, 0.5, 0.0, 0.5], 0.5)
    assert limiter.seed(np.array([1.5 + 1 / 32, 7, 7, -1 - 1 / 64])) is None, (
        "one tick's way outside is taken as inside"
    )
    assert limiter.is_known and limiter.values.tolist() == [1.5, 1, 0.25, -1]
    assert [part.tolist() for part in limiter.snapshot()[1:]] == [[0, 0.5, 0, 0], [0, 0.5, 0.5, 0]], "at rest"
    assert "n3 is at -1.023, outside -1..1.5" in str(limiter.seed(np.array([0, 7, 7, -1 - 1.5 / 64])))
    assert "n0 is at 1.532, outside -1..1.5" in str(limiter.seed(np.array([1.5 + 1.01 / 32, 7, 7, 0])))
    assert limiter.values.tolist() == [1.5, 1, 0.25, -1], "then nothing is taken"
    limiter.forget()
    assert np.isnan(limiter.values).tolist() == [True, False, False, True]
    box = {**BOX, "low": [-0.5, -0.25, -2], "high": [2.0, 0.25, 0.75]}
    limits = Limiter(config(gripper, gripper, gripper, gripper, workspace=box))
    assert limits.values.tolist() == [1, 0.25, 0.75, 1], "a start outside the workspace"
    for end, corner in ((9.0, [1.5, 0.25, 0.75, 1.5]), (-9.0, [-0.5, -0.25, -1, -1])):
        for _ in range(100):
            limits.move(np.full(4, end), TICK)
        assert limits.values.tolist() == corner


def test_the_workspace_cuts_speeds_alone_and_leaves_their_acceleration() -> None:
    numbers = [NUMBERS["smooth speed, hard stops"], SPEED, NUMBERS["position"], {**NUMBERS["smooth speed"], "low": -1}]
    limiter, none = Limiter(config(*numbers)), np.full(4, np.inf)
    room = Room(-none, np.array([0.25, 0.125, 0.0, np.inf]), -none, none)
    planted(limiter, [0.5, 0, 0, 0.25], [0.5, 0, 0, 0.25])
    values, limited = limiter.move(np.array([0.5, 0.5, 1.0, 0.25]), TICK, room)
    assert values.tolist() == pytest.approx([0.25, 0.125, 0.75 * TICK, 0.25]) and "workspace" in limited
    assert limiter.snapshot()[1].tolist() == pytest.approx([-4.0, 0, 0.75, 0.0], abs=0.26), "as hard as it was cut"
    assert limiter.snapshot()[1][0] == -4.0 and limiter.snapshot()[1][2] == 0.75
    planted(limiter, [0.5, 0, 0, 0])
    limiter.move(np.array([0.5, 0, 0, 0]), TICK, room._replace(high=np.array([0.5 - 1 / 32, 1, 1, 1])))
    assert limiter.snapshot()[1][0] == -0.5, "gently: (15/32 - 16/32) / tick"
    planted(limiter, [0.5, 0, 0, 0.25])
    assert limiter.move(None, 0.0, room._replace(high=np.array([0.5 - 1 / 32, 1, 1, 1])))[1] == {"workspace"}
    assert limiter.snapshot()[1].tolist() == [-0.5, 0, 0, 0], "no time has passed: as if it were a tick"
    planted(limiter, [0.5, 0, 0.5, 0.25])
    assert limiter.move(np.array([0.5, 0, 0.5, 0.25]), 0.0)[1] == set() and limiter.values.tolist() == [
        0.5,
        0,
        0.5,
        0.25,
    ]
    asked = np.array([0.25, 0.125, 0.5, 0.25])
    planted(limiter, [0.25, 0.125, 0.5, 0.25])
    assert limiter.move(asked, TICK, room) == (pytest.approx(asked), set()), "up to its sides nothing is cut"


def test_where_the_jerk_is_limited_the_workspace_is_aimed_at_softly() -> None:
    limiter, none = Limiter(config(NUMBERS["smooth speed"])), np.array([np.inf])
    for end, goal in ((0.5, 0.125), (-0.25, -0.0625)):
        room = Room(-none, none, np.array([-0.0625]), np.array([0.125]))
        planted(limiter, 0.0)
        for _ in range(100):
            limiter.move(np.array([end]), TICK, room)
        assert limiter.values[0] == pytest.approx(goal, abs=1e-8)


def test_a_hard_braking_ends_where_a_tolerance_says() -> None:
    """Rounding is no reason to brake, on either side, in the unit of the range: -1..0, 0..1 and 0..8."""
    for low, high in ((-1.0, 0.0), (0.0, 1.0), (0.0, 8.0), (-8.0, 0.0)):
        number = {**NUMBERS["smooth speed"], "low": low, "high": high}
        for beyond, names in ((TOLERANCE * (high - low), set()), (1.5 * TOLERANCE * (high - low), {"braking"})):
            for value in (
                (low - beyond, high + beyond) if low == -high else ((high + beyond,) if high == 0 else (low - beyond,))
            ):
                limiter = planted(Limiter(config(number)), value)
                assert limiter.move(np.array([value]), TICK)[1] - {"bounds", "jerk"} == names


# --- the workspace ------------------------------------------------------------------------------


def seen(place: list[float], stamp: float = 0.0) -> RobotObservation:
    return RobotObservation({}, np.array(place, np.float32), "", stamp)


@pytest.mark.parametrize(("gain", "unit"), [(1.0, 1.0), (2.5, 0.5), (2.0, 4.0)])
@pytest.mark.parametrize("sends", [(0.0, 0.0, 0.0), (0.5, 0.25, -0.125)])
def test_the_room_to_each_side_is_what_lets_it_stop_there(gain: float, unit: float, sends: tuple[float, ...]) -> None:
    """Two values were sent since the observation, and one before that counts where the robot is late."""
    numbers = [NUMBERS["smooth speed"], NUMBERS["braked speed"], SPEED, SPEED, NUMBERS["position"]]
    safety = config(*numbers, workspace={**BOX, "state": [1, 2, 3], "commands": [2, 1, 0], "meters_per_unit": unit})
    guard, place = WorkspaceGuard(safety), [9.0, 0.125, -0.25, 0.75]
    for k in (-2, -1, 0, 1):
        guard.remember(np.array([*sends[::-1], 7.0, 7.0]), k * TICK)
    assert guard.moved_since(0.0)[:3] == pytest.approx(2 * TICK * np.array(sends[::-1]))
    room = guard.room(seen(place), gain, TICK)
    assert room is not None
    for axis, number in enumerate((2, 1, 0)):
        here = place[1 + axis]
        there = here + 3 * TICK * sends[axis] * unit * gain
        rate = safety.dimensions[number].max_acceleration or math.inf
        ramp = 1.0 / 8.0 if number == 0 else 0.0
        for side, sign in (("high", 1.0), ("low", -1.0)):
            left = max(0.0, sign * BOX[side][axis] - max(sign * here, sign * there)) / (unit * gain)
            found = sign * getattr(room, side)[number], sign * getattr(room, f"soft_{side}")[number]
            assert found == pytest.approx((highest(left, rate, TICK), highest(left, rate / 2, TICK + ramp))), (
                axis,
                side,
            )
    for side, sign in (("high", 1), ("low", -1)):
        assert (sign * getattr(room, side)[3:] == math.inf).all() and (
            sign * getattr(room, f"soft_{side}")[3:] == math.inf
        ).all()
    outside = guard.room(seen([9.0, 0.75, -0.75, 2.0]), gain, TICK)
    assert outside is not None and outside.high[2] == outside.low[1] == outside.high[0] == 0


def test_what_was_sent_is_remembered_as_long_as_it_is_needed() -> None:
    safety = config(SPEED, SPEED, SPEED, hz=1000.0, workspace=BOX, observation_timeout=0.25)
    guard = WorkspaceGuard(safety)
    for k in range(2000):
        guard.remember(np.array([1.0, 0, 0]), k / 1000)
    assert guard.moved_since(2.0 - 0.25 - 0.3 - 0.0995)[0] == pytest.approx(0.649), "late by the longest lag"
    guard.forget()
    assert guard.moved_since(0.0).tolist() == [0, 0, 0]


def test_who_has_a_room_and_who_has_left_it() -> None:
    joints = [{**POSITION, "max_velocity": 1.0}] * 3
    velocities, positions = config(SPEED, SPEED, SPEED, workspace=BOX), config(*joints, workspace=BOX)
    under_joints = config(*joints, workspace={**BOX, "commands": None})
    mixed = config(joints[0], SPEED, SPEED, SPEED, workspace={**BOX, "commands": [1, 2, 3]})
    middle, outside = seen([0.0, 0.0, 0.0]), seen([0.0, 0.5, 0.0])
    assert [WorkspaceGuard(c).state_size for c in (velocities, under_joints, config(SPEED))] == [3, 3, 0]
    for safety, has_room in ((velocities, True), (mixed, True), (positions, False), (under_joints, False)):
        assert (WorkspaceGuard(safety).room(middle, 1.0, 0.0) is not None) is has_room
    assert WorkspaceGuard(config(SPEED)).room(middle, 1.0, 0.0) is None
    assert WorkspaceGuard(velocities).left(outside) is WorkspaceGuard(positions).left(outside) is None
    assert WorkspaceGuard(config(SPEED)).left(outside) is None
    left = WorkspaceGuard(under_joints).left
    assert left(outside) == "the end effector left the workspace (y)"
    assert left(seen([0.5, 0.25, -0.5])) is left(seen([-0.5, -0.5, 1.0])) is None, "its sides belong to it"
    assert "(x)" in str(left(seen([0.5625, 0, 0]))) and "(z)" in str(left(seen([0, 0, -0.5625])))
