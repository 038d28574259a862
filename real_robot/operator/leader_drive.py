"""Drives an actuated leader arm to where the robot is, so that the person takes it in hand there.

Once in each take-over: its torque comes on where it is, it goes to the robot's set-point at a bounded speed, is held
there for a moment, and let go. It is let go at once where it does not follow, as when a hand or an obstacle holds it;
then the person aligns it by hand. The robot holds all the while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from real_robot.contract.safety import SafetyConfig

HELD_FOR = 2.0  # seconds at the robot's pose in which the person takes it in hand
RESISTS = 0.1  # share of a number's low..high that it may stay behind
MOST_STEP = RESISTS / 4  # share of a number's low..high that the goal moves between two readings of the leader


class Driven(Protocol):
    """A leader with motors."""

    def drive(self, goal: np.ndarray | None) -> None:
        """Go to this command, float32 (A,) in the contract's units, with torque on; None: torque off. Does not wait."""
        ...


class LeaderDrive:
    """See the module.

    Args:
        within: as a share of each number's low..high, how near is there.
        speed: the most that it is driven, in such shares a second. tell: a line for the console.
    """

    def __init__(
        self,
        leader: Driven,
        safety: SafetyConfig,
        within: float,
        speed: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leader, self._within, self._speed = leader, within, speed
        self._tell, self._clock = tell, clock
        self._names = [d.name for d in safety.dimensions]
        self._range = np.array([d.high - d.low for d in safety.dimensions])
        self._state: Literal["ready", "moving", "held", "over"] = "ready"
        self._goal, self._then = np.zeros(len(self._range)), 0.0

    def step(self, at: np.ndarray, read: float, told: np.ndarray) -> bool:
        """One tick of a take-over. True as long as the leader is driven or held: it must not be followed.

        Args:
            at, told: float32 (A,), where the leader is, and what the robot was told last.
            read: when it was found there; the goal moves with each reading, so that a slow line is no resistance.
        """
        now = self._clock()
        if self._state == "ready":
            if self._is_near(at, told):
                self._state = "over"
                return False
            self._state, self._goal, self._then = "moving", at.astype(np.float64), read
            self._tell("the leader moves to where the robot is: let it move")
        if self._state == "over":
            return False
        behind = np.abs(at - self._goal) / self._range
        if behind.max() > RESISTS:
            self._state = "over"
            self._leader.drive(None)
            self._tell(
                f"the leader does not follow at {self._names[int(behind.argmax())]} and was let go: move it by hand"
            )
            return False
        if self._state == "moving":
            self._move(told, read)
            if self._is_near(at, told) and np.allclose(self._goal, told):
                self._state, self._then = "held", now
                self._tell(f"the leader is where the robot is: take it in hand, it lets go in {HELD_FOR:g} s")
        elif now - self._then >= HELD_FOR:
            self._state = "over"
            self._leader.drive(None)
            return False
        self._leader.drive(self._goal.astype(np.float32))
        return True

    def release(self) -> None:
        """The take-over is interrupted or over: let the leader go."""
        if self._state in ("moving", "held"):
            self._state = "over"
            self._leader.drive(None)

    def rearm(self) -> None:
        """The next take-over drives it again."""
        self.release()
        self._state = "ready"

    def _move(self, told: np.ndarray, read: float) -> None:
        most = self._range * min(self._speed * max(0.0, read - self._then), MOST_STEP)
        self._goal = self._goal + np.clip(told - self._goal, -most, most)
        self._then = read

    def _is_near(self, at: np.ndarray, told: np.ndarray) -> bool:
        return bool((np.abs(at - told) <= self._within * self._range).all())
