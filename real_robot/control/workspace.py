"""The box that the end effector stays in: how fast it may still go towards each side, and whether it is outside."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from real_robot.contract.safety import SafetyConfig
from real_robot.control.limiter import Room, braking_speed
from real_robot.types import RobotObservation


class WorkspaceGuard:
    """Knows the workspace of a `SafetyConfig`, and what was sent since the newest observation."""

    def __init__(self, config: SafetyConfig) -> None:
        self._box, self._dimensions, self._tick = config.workspace, config.dimensions, 1.0 / config.control_hz
        self._ways: deque[tuple[float, np.ndarray]] = deque(maxlen=256)  # (time, way in the tick after)

    @property
    def state_size(self) -> int:
        """Numbers that an observed state must have at least."""
        return 0 if self._box is None else max(self._box.state) + 1

    def remember(self, values: np.ndarray, now: float) -> None:
        """Note what was sent, float64 (A,)."""
        self._ways.append((now, values * self._tick))

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

    def room(self, observation: RobotObservation) -> Room | None:
        """Velocities that keep the end effector in its box: measured position, and where it may be by now."""
        box, dims = self._box, self._dimensions
        if box is None or box.commands is None or dims[box.commands[0]].kind != "velocity":
            return None
        none = np.full(len(dims), np.inf)
        room = Room(-none, none.copy(), -none, none.copy())
        way = self.moved_since(observation.stamp)
        for axis, number in enumerate(box.commands):
            limits, unit = dims[number], box.meters_per_unit
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
