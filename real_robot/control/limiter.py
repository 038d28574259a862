"""The motion limiter and the workspace: what may be sent at this tick, given what was sent at the last ones.

A set-point x with limits low..high moves with speed v. If v is towards `high`, it can be brought to rest at
deceleration a within v^2 / (2 a), whatever the lengths of the ticks to come, since each tick first brakes by a dt,
then moves. So if each tick either brakes by a dt or chooses a v with v dt + v^2 / (2 a) <= goal - x, the set-point can
always stop before its goal without braking harder than a; and since goals are first cut to low..high, before its limits
too. The largest such v for a distance d is `braking_speed(d, a, dt)`.

A velocity with a limit of its jerk is the same, one order up: the velocity is moved, at most as fast as its
acceleration allows, and its acceleration changes as its jerk allows. For a position with one see `control.jerk`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from real_robot.contract.safety import SafetyConfig
from real_robot.control.jerk import TOLERANCE, Bounds, Motion1D
from real_robot.control.motion import UNKNOWN_DELAY
from real_robot.types import RobotObservation


def braking_speed(
    distance: float | np.ndarray, acceleration: float | np.ndarray, dt: float
) -> np.floating | np.ndarray:
    """Return the largest v >= 0 with v dt + v^2 / (2 acceleration) <= distance.

    For infinite acceleration that is distance / dt.
    """
    return 2 * distance / (np.sqrt(dt * dt + 2 * distance / acceleration) + dt)


class Room(NamedTuple):
    """Velocities that the workspace leaves open, each (A,): zero or below for the `low`, zero or above for the `high`.

    What is sent is cut to low..high, harder than max_acceleration and max_jerk if need be. Where the jerk is limited,
    soft_low..soft_high is what it aims at before, so that there is no need.
    """

    low: np.ndarray
    high: np.ndarray
    soft_low: np.ndarray
    soft_high: np.ndarray


class Limiter:
    """Keeps what was sent last, and moves it towards what is asked as far as the limits allow. No clock, no states.

    `values` float64 (A,): sent last; NaN for a position whose start is not known yet.
    """

    def __init__(self, config: SafetyConfig) -> None:
        dims = config.dimensions
        self.tick = 1.0 / config.control_hz
        self.names = tuple(d.name for d in dims)
        self._is_velocity = np.array([d.kind == "velocity" for d in dims])
        self._low, self._high = np.array([d.low for d in dims]), np.array([d.high for d in dims])
        box = config.workspace
        if box is not None and box.commands is not None and dims[box.commands[0]].kind == "position":
            rows = list(box.commands)
            self._low[rows] = np.maximum(self._low[rows], box.low)
            self._high[rows] = np.minimum(self._high[rows], box.high)
        fastest, step = _optional([d.max_velocity for d in dims]), _optional([d.max_step for d in dims]) / self.tick
        acceleration = _optional([d.max_acceleration for d in dims])
        stop_acceleration = _optional([d.stop_acceleration or d.max_acceleration for d in dims])
        self._speed = np.minimum(fastest, step)
        self._acceleration = np.where(self._is_velocity, np.minimum(acceleration, step), acceleration)
        self._stop_acceleration = np.where(self._is_velocity, np.minimum(stop_acceleration, step), stop_acceleration)
        self._changes = [  # what limits the change of each number
            "step" if by_step else "acceleration" if d.kind == "velocity" else "velocity"
            for by_step, d in zip(step <= np.where(self._is_velocity, acceleration, fastest), dims, strict=True)
        ]
        self._jerk = _optional([d.max_jerk for d in dims])
        self._stop_jerk = _optional([d.stop_jerk or d.max_jerk for d in dims])
        self._is_smooth = self._is_velocity & np.isfinite(self._jerk)  # velocities with a limit of their jerk
        self._bounds = {  # number -> usual and stopping bounds, of positions with a limit of their jerk
            i: (usual, replace(usual, acceleration=float(self._stop_acceleration[i]), jerk=float(self._stop_jerk[i])))
            for i in np.flatnonzero(~self._is_velocity & np.isfinite(self._jerk)).tolist()
            for usual in [Bounds(float(self._speed[i]), float(self._acceleration[i]), float(self._jerk[i]))]
        }
        self._state = np.array([-1 if d.state is None else d.state for d in dims])
        self._low32, self._high32 = _inside(self._low, self._high)
        self.values = np.array([0.0 if d.kind == "velocity" else np.nan if d.start is None else d.start for d in dims])
        self.values = np.clip(self.values, self._low, self._high)  # a start outside the workspace; NaN stays
        self._moving = np.zeros(len(dims))  # speed of each position; acceleration of each smooth velocity
        self._accelerating = np.zeros(len(dims))  # acceleration of each position with a limit of its jerk

    @property
    def state_size(self) -> int:
        """Numbers that an observed state must have at least, for the positions measured in it."""
        return int(self._state.max(initial=-1)) + 1

    @property
    def is_known(self) -> bool:
        """Every position is known, so that something can be sent."""
        return not np.isnan(self.values).any()

    @property
    def is_still(self) -> bool:
        """Nothing moves: positions stand, velocities are zero."""
        moving = self._moving.any() or self._accelerating.any()
        return not moving and not self.values[self._is_velocity].any()

    def seed(self, state: np.ndarray) -> str | None:
        """Take positions from the observed state (S,), at rest. Returns None, or what is outside its limits by more
        than one tick's way (then nothing is taken)."""
        measured = self._state >= 0
        found = np.where(measured, state[np.maximum(self._state, 0)], self.values)
        inside = np.clip(found, self._low, self._high)
        too_far = measured & (np.abs(found - inside) > self._speed * self.tick)
        if too_far.any():
            i = int(np.flatnonzero(too_far)[0])
            return f"{self.names[i]} is at {found[i]:.4g}, outside {self._low[i]:.4g}..{self._high[i]:.4g}"
        self.values = inside
        self._moving = np.where(measured, 0.0, self._moving)
        self._accelerating = np.where(measured, 0.0, self._accelerating)
        return None

    def forget(self) -> None:
        """Positions that are measured are not known any more, until `seed`."""
        self.values = np.where(self._state >= 0, np.nan, self.values)

    def snapshot(self) -> tuple[np.ndarray, ...]:
        """What `restore` takes to undo a move."""
        return self.values.copy(), self._moving.copy(), self._accelerating.copy()

    def restore(self, snapshot: tuple[np.ndarray, ...]) -> None:
        """Go back to a snapshot."""
        self.values, self._moving, self._accelerating = (part.copy() for part in snapshot)

    @property
    def braking_way(self) -> np.ndarray:
        """float64 (A,): how far each number goes on when it brakes from the next tick on.

        A position: the way of the set-point. A velocity: the integral of the speed until it is zero, from the last
        tick on.
        """
        speed = np.where(self._is_velocity, self.values, self._moving)
        rising = np.where(self._is_smooth, self._moving, 0.0)  # it goes on to change until its jerk has let it go
        settled = speed + rising * np.abs(rising) / (2 * self._stop_jerk)  # one that stands may be about to move
        speed = np.where(np.abs(settled) > np.abs(speed), settled, speed)
        way = speed * np.abs(speed) / (2 * self._stop_acceleration)
        after = np.full(len(way), self.tick)  # seconds in which it goes on before it brakes fully
        full = self._stop_acceleration[self._is_smooth] + np.abs(rising[self._is_smooth])
        after[self._is_smooth] += full / self._stop_jerk[self._is_smooth]
        way = way + np.where(self._is_velocity, speed * after, 0.0)
        for i, (_, stopping) in self._bounds.items():
            way[i] = stopping.extent(float(self._moving[i]), float(self._accelerating[i])).end
        return way

    def stand(self) -> None:
        """Positions have stood still, and velocities been constant, since nothing was sent for a while."""
        self._moving[:] = 0.0
        self._accelerating[:] = 0.0

    def halt(self) -> None:
        """Velocities are zero at once, whatever the accelerations."""
        self.values = self._at_rest()
        self._moving = np.where(self._is_velocity, 0.0, self._moving)

    def move(self, target: np.ndarray | None, dt: float, room: Room | None = None) -> tuple[np.ndarray, set[str]]:
        """One tick.

        Args:
            target: float64 (A,), finite, what is asked; None brakes (positions come to rest, velocities to zero).
            dt: seconds since the last tick, 0 to the tick's length.
            room: what the workspace allows; None: anything.

        Returns:
            float32 (A,) to send, within low..high to the last bit, and the names of the limits that acted.
        """
        asked = np.clip(self._at_rest() if target is None else target, self._low, self._high)
        limited = {"bounds"} if target is not None and (asked != target).any() else set()
        if dt > 0:
            positions, names = self._move_positions(asked, dt, target is None)
            velocities, more = self._change_velocities(asked, dt, target is None, room)
            limited |= names | more
        else:
            positions, velocities = self.values, self.values
        if room is not None:
            allowed = np.clip(velocities, room.low, room.high)
            if (cut := self._is_velocity & (allowed != velocities)).any():
                limited.add("workspace")
                change, smooth = (allowed - self.values) / (dt or self.tick), cut & self._is_smooth
                self._moving[smooth] = np.clip(change, -self._stop_acceleration, self._stop_acceleration)[smooth]
            velocities = allowed
        self.values = np.where(self._is_velocity, velocities, positions)
        return np.clip(self.values.astype(np.float32), self._low32, self._high32), limited

    def _at_rest(self) -> np.ndarray:
        return np.where(self._is_velocity, 0.0, self.values)

    def _move_positions(self, asked: np.ndarray, dt: float, brakes: bool) -> tuple[np.ndarray, set[str]]:
        distance, acceleration = asked - self.values, self._stop_acceleration if brakes else self._acceleration
        is_plain = ~self._is_velocity & ~np.isfinite(self._jerk)
        speed = _approach(distance, self._speed, self._moving, acceleration, dt)
        limited = {self._changes[i] for i in np.flatnonzero(is_plain & (np.abs(distance) > self._speed * dt))}
        wanted = np.clip(distance / dt, -self._speed, self._speed)
        if (is_plain & ~np.isclose(speed, wanted)).any():
            limited.add("acceleration")
        moved = np.clip(self.values + speed * dt, self._low, self._high)
        self._moving = np.where(is_plain, speed, self._moving)
        for i in self._bounds:
            moved[i], names = self._move_smoothly(i, float(asked[i]), dt, brakes)
            limited |= names
        return moved, limited

    def _move_smoothly(self, i: int, asked: float, dt: float, brakes: bool) -> tuple[float, set[str]]:
        """One position with a limit of its jerk, `dt` seconds on, and the limits that acted."""
        usual, stopping = self._bounds[i]
        here = Motion1D(float(self.values[i]), float(self._moving[i]), float(self._accelerating[i]))
        low, high = float(self._low[i]), float(self._high[i])
        if brakes or not usual.allows(here, low, high):  # a hard braking is brought to its end
            there, names = stopping.brake(here, dt), set() if brakes else {"braking"}
        else:
            there, names = usual.step(here, asked, dt), set()
            if abs(there.position - asked) > TOLERANCE * (high - low):
                names = {self._acting(abs(there.speed), abs(there.acceleration), i)}
        _, self._moving[i], self._accelerating[i] = there
        return min(max(there.position, low), high), names

    def _acting(self, speed: float, acceleration: float, i: int) -> str:
        if _is_at(speed, self._speed[i]):
            return self._changes[i]
        return "acceleration" if _is_at(acceleration, self._acceleration[i]) else "jerk"

    def _change_velocities(
        self, asked: np.ndarray, dt: float, brakes: bool, room: Room | None
    ) -> tuple[np.ndarray, set[str]]:
        change = (self._stop_acceleration if brakes else self._acceleration) * dt
        velocities = np.clip(asked, self.values - change, self.values + change)
        smooth, limited = self._change_smoothly(asked, dt, brakes, room)
        short = self._is_velocity & ~self._is_smooth & (velocities != asked)
        return np.where(self._is_smooth, smooth, velocities), limited | {
            self._changes[i] for i in np.flatnonzero(short)
        }

    def _change_smoothly(
        self, asked: np.ndarray, dt: float, brakes: bool, room: Room | None
    ) -> tuple[np.ndarray, set[str]]:
        """Velocities with a limit of their jerk, `dt` seconds on, and the limits that acted."""
        speed, before = self.values, self._moving
        settles = speed + before * np.abs(before) / (2 * self._jerk)  # when it lets go of its acceleration
        slack = TOLERANCE * (self._high - self._low)
        unfit = np.maximum(settles - self._high, self._low - settles) > slack
        unfit |= np.abs(before) > self._acceleration  # a hard braking is brought to its end
        goal = asked if room is None else np.clip(asked, room.soft_low, room.soft_high)
        goal = np.where(unfit, 0.0, goal)
        most = np.where(unfit | brakes, self._stop_acceleration, self._acceleration)
        after = _approach(goal - speed, most, before, np.where(unfit | brakes, self._stop_jerk, self._jerk), dt)
        there = np.clip(speed + after * dt, self._low, self._high)
        is_short = np.abs(goal - there) > slack
        self._moving = np.where(self._is_smooth, after, before)
        short = np.flatnonzero(self._is_smooth & is_short)
        names = {self._changes[i] if _is_at(abs(float(after[i])), float(most[i])) else "jerk" for i in short}
        if not brakes and (self._is_smooth & unfit).any():
            names.add("braking")
        return np.where(is_short, there, goal), names


def _is_at(value: float, limit: float) -> bool:
    return value > limit * 0.999


def _approach(distance: np.ndarray, most: np.ndarray, before: np.ndarray, rate: np.ndarray, dt: float) -> np.ndarray:
    """The highest speed up to `most` that can rest within `distance`, or what `rate` lets come nearest to it."""
    speed = np.copysign(np.minimum(most, braking_speed(np.abs(distance), rate, dt)), distance)
    return np.clip(speed, before - rate * dt, before + rate * dt)


def _optional(values: list[float | None]) -> np.ndarray:
    """float64, infinite where there is no limit."""
    return np.array([np.inf if value is None else value for value in values])


def _inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float32 nearest to each limit that is not beyond it."""
    low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return low32.astype(np.float32), high32.astype(np.float32)


class WorkspaceGuard:
    """Knows the workspace of a `SafetyConfig`, and what was sent since the newest observation."""

    def __init__(self, config: SafetyConfig) -> None:
        self._box, self._dimensions, self._tick = config.workspace, config.dimensions, 1.0 / config.control_hz
        longest = config.observation_timeout + config.checks.following_lag + UNKNOWN_DELAY  # that room() looks back
        size = max(256, math.ceil(longest / self._tick))
        self._ways: deque[tuple[float, np.ndarray]] = deque(maxlen=size)  # (time, way in the tick after)

    @property
    def state_size(self) -> int:
        """Numbers that an observed state must have at least."""
        return 0 if self._box is None else max(self._box.state) + 1

    def remember(self, values: np.ndarray, now: float) -> None:
        """Note what was sent, float64 (A,)."""
        self._ways.append((now, values * self._tick))

    def forget(self) -> None:
        """What was sent before does not count any more: the clock has gone backwards."""
        self._ways.clear()

    def moved_since(self, stamp: float) -> np.ndarray:
        """Float64 (A,): the integral of each velocity that was sent since then."""
        ways = [way for sent, way in self._ways if sent >= stamp]
        return np.sum(ways, axis=0) if ways else np.zeros(len(self._dimensions))

    def left(self, observation: RobotObservation) -> str | None:
        """Where the end effector is outside, under joint commands: nobody knows which way leads back."""
        box = self._box
        if box is None or box.commands is not None:
            return None
        for axis, number, low, high in zip("xyz", box.state, box.low, box.high, strict=True):
            if not low <= observation.state[number] <= high:
                return f"the end effector left the workspace ({axis})"
        return None

    def room(self, observation: RobotObservation, gain: float, delay: float) -> Room | None:
        """Velocities that keep the end effector in its box: measured position, and where it may be by now.

        `gain`, `delay`: how many times as far as it is told it may go, and how many seconds later.
        """
        box, dims = self._box, self._dimensions
        if box is None or box.commands is None or dims[box.commands[0]].kind != "velocity":
            return None
        none = np.full(len(dims), np.inf)
        room = Room(-none, none.copy(), -none, none.copy())
        way = self.moved_since(observation.stamp - delay)
        for axis, number in enumerate(box.commands):
            limits, unit = dims[number], box.meters_per_unit * gain
            here = float(observation.state[box.state[axis]])
            there = here + way[number] * unit
            acceleration = limits.max_acceleration or math.inf
            ramp = acceleration / limits.max_jerk if limits.max_jerk else 0.0
            above = max(0.0, box.high[axis] - max(here, there)) / unit
            below = max(0.0, min(here, there) - box.low[axis]) / unit
            room.high[number] = braking_speed(above, acceleration, self._tick)
            room.low[number] = -braking_speed(below, acceleration, self._tick)
            room.soft_high[number] = braking_speed(above, acceleration / 2, self._tick + ramp)
            room.soft_low[number] = -braking_speed(below, acceleration / 2, self._tick + ramp)
        return room
