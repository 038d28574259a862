"""The arithmetic of the safety limits: what may be sent at this tick, given what was sent at the last ones.

A set-point x with limits low..high moves with speed v. If v is towards `high`, it can be brought to rest at
deceleration a within v^2 / (2 a), whatever the lengths of the ticks to come, since each tick first brakes by a dt,
then moves. So if each tick either brakes by a dt or chooses a v with v dt + v^2 / (2 a) <= goal - x, the set-point can
always stop before its goal without braking harder than a; and since goals are first cut to low..high, before its limits
too. The largest such v for a distance d is `braking_speed(d, a, dt)`.
"""

from __future__ import annotations

import numpy as np

from real_robot.control.safety_config import SafetyConfig


def braking_speed(
    distance: float | np.ndarray, acceleration: float | np.ndarray, dt: float
) -> np.floating | np.ndarray:
    """Return the largest v >= 0 with v dt + v^2 / (2 acceleration) <= distance.

    For infinite acceleration that is distance / dt.
    """
    return 2 * distance / (np.sqrt(dt * dt + 2 * distance / acceleration) + dt)


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
        self._step = _optional([d.max_step for d in dims])
        self._speed = np.minimum(_optional([d.max_velocity for d in dims]), self._step / self.tick)
        self._acceleration = _optional([d.max_acceleration for d in dims])
        self._stop_acceleration = _optional([d.stop_acceleration or d.max_acceleration for d in dims])
        self._state = np.array([-1 if d.state is None else d.state for d in dims])
        self._low32, self._high32 = _inside(self._low, self._high)
        self.values = np.array([0.0 if d.kind == "velocity" else np.nan if d.start is None else d.start for d in dims])
        self.values = np.clip(self.values, self._low, self._high)  # a start outside the workspace; NaN stays
        self._moving = np.zeros(len(dims))  # speed of each position

    @property
    def num_dimensions(self) -> int:
        return len(self.names)

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
        return not self._moving.any() and not self.values[self._is_velocity].any()

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
        return None

    def snapshot(self) -> tuple[np.ndarray, ...]:
        """What `restore` takes to undo a move."""
        return self.values.copy(), self._moving.copy()

    def restore(self, snapshot: tuple[np.ndarray, ...]) -> None:
        """Go back to a snapshot."""
        self.values, self._moving = (part.copy() for part in snapshot)

    @property
    def braking_way(self) -> np.ndarray:
        """float64 (A,): how far each number goes on when it brakes from the next tick on.

        A position: the way of the set-point. A velocity: the integral of the speed until it is zero, from the last
        tick on.
        """
        speed = np.where(self._is_velocity, self.values, self._moving)
        way = speed * np.abs(speed) / (2 * self._stop_acceleration)
        return way + np.where(self._is_velocity, speed * self.tick, 0.0)

    def stand(self) -> None:
        """Positions have stood still, since nothing was sent for a while."""
        self._moving[:] = 0.0

    def halt(self) -> None:
        """Velocities are zero at once, whatever the accelerations."""
        self.values = self._at_rest()

    def move(
        self, target: np.ndarray | None, dt: float, room: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, set[str]]:
        """One tick.

        Args:
            target: float64 (A,), finite, what is asked; None brakes (positions come to rest, velocities to zero).
            dt: seconds since the last tick, 0 to the tick's length.
            room: smallest (<= 0) and largest (>= 0) velocity (A,) that the workspace allows; stronger than
                max_acceleration. None: any.

        Returns:
            float32 (A,) to send, within low..high to the last bit, and the names of the limits that acted.
        """
        asked = np.clip(self._at_rest() if target is None else target, self._low, self._high)
        limited = {"bounds"} if target is not None and (asked != target).any() else set()
        acceleration = self._stop_acceleration if target is None else self._acceleration
        if dt > 0:
            positions, names = self._move_positions(asked, acceleration, dt, target is None)
            velocities, more = self._change_velocities(asked, acceleration, dt)
            limited |= names | more
        else:
            positions, velocities = self.values, self.values
        if room is not None:
            allowed = np.clip(velocities, *room)
            if (allowed != velocities)[self._is_velocity].any():
                limited.add("workspace")
            velocities = allowed
        self.values = np.where(self._is_velocity, velocities, positions)
        return np.clip(self.values.astype(np.float32), self._low32, self._high32), limited

    def _at_rest(self) -> np.ndarray:
        return np.where(self._is_velocity, 0.0, self.values)

    def _move_positions(
        self, asked: np.ndarray, acceleration: np.ndarray, dt: float, brakes: bool
    ) -> tuple[np.ndarray, set[str]]:
        here, before = self.values, self._moving
        distance = asked - here
        desired = np.zeros_like(here) if brakes else distance / dt
        speed = np.clip(desired, -self._speed, self._speed)
        limited = set()
        if (fast := ~self._is_velocity & (speed != desired)).any():
            limited |= {
                "step" if self._step[i] < self._speed[i] * self.tick * (1 + 1e-9) else "velocity"
                for i in np.flatnonzero(fast)
            }
        gentle = speed
        if not brakes:
            gentle = np.copysign(np.minimum(np.abs(speed), braking_speed(np.abs(distance), acceleration, dt)), distance)
        gentle = np.clip(gentle, before - acceleration * dt, before + acceleration * dt)
        gentle = np.clip(gentle, -self._speed, self._speed)
        if (~self._is_velocity & ~np.isclose(gentle, speed, rtol=1e-9, atol=1e-12)).any():
            limited.add("acceleration")
        moved = np.clip(here + gentle * dt, self._low, self._high)
        self._moving = np.where(self._is_velocity, 0.0, gentle)
        return moved, limited

    def _change_velocities(self, asked: np.ndarray, acceleration: np.ndarray, dt: float) -> tuple[np.ndarray, set[str]]:
        change = np.minimum(acceleration * dt, self._step)
        velocities = np.clip(asked, self.values - change, self.values + change)
        short = np.flatnonzero(self._is_velocity & (velocities != asked))
        return velocities, {"step" if self._step[i] <= acceleration[i] * dt else "acceleration" for i in short}


def _optional(values: list[float | None]) -> np.ndarray:
    """float64, infinite where there is no limit."""
    return np.array([np.inf if value is None else value for value in values])


def _inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The float32 nearest to each limit that is not beyond it."""
    low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return low32.astype(np.float32), high32.astype(np.float32)
