"""Leader-arm teleoperation: the leader says where each joint is to be, so it must first be where the robot is.

While the leader is elsewhere the robot holds, and the console says which joints are off. Once aligned it drives, within
the supervisor's limits like everything else. When the robot stopped or held meanwhile, when control changed hands, or
when the leader fell silent, it must be aligned anew. A leader with motors may be driven there (`LeaderDrive`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from real_robot.contract.safety import SafetyConfig
from real_robot.control.supervisor import RUNNING, STOPPED
from real_robot.operator.devices import LeaderArm

HELD_FOR = 2.0  # seconds at the robot's pose in which the person takes it in hand
RESISTS = 0.1  # share of a number's low..high that it may stay behind
MOST_STEP = RESISTS / 4  # share of a number's low..high that the goal moves between two readings of the leader
SAY_EVERY = 2.0  # seconds between two lines about the same misalignment


class LeaderDrive:
    """Drives an actuated leader arm to where the robot is, so that the person takes it in hand there.

    Once in each take-over: its torque comes on where it is, it goes to the robot's set-point at a bounded speed, is
    held there for a moment, and let go. It is let go at once where it does not follow, as when a hand or an obstacle
    holds it; then the person aligns it by hand. The robot holds all the while.

    Args:
        within: as a share of each number's low..high, how near is there.
        speed: the most that it is driven, in such shares a second. tell: a line for the console.
    """

    def __init__(
        self,
        leader: LeaderArm,
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


class LeaderFollowing:
    """See the module.

    Args:
        within: largest distance of the leader from the set-point, as a share of each number's low..high, to be aligned.
        timeout: seconds: an older target is not followed.
        tell: a line for the console.
        drive: what drives the leader to the robot at each take-over; None: the person does.
    """

    def __init__(
        self,
        leader: LeaderArm,
        safety: SafetyConfig,
        within: float,
        timeout: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        drive: LeaderDrive | None = None,
    ) -> None:
        self._leader, self._within, self._timeout, self._drive = leader, within, timeout, drive
        self._tell, self._clock = tell, clock
        self._names = [d.name for d in safety.dimensions]
        self._range = np.array([d.high - d.low for d in safety.dimensions])
        self._gave = self._drives = False
        self._told, self._told_at = "", float("-inf")

    @property
    def drives(self) -> bool:
        """The robot follows the leader."""
        return self._drives

    def step(self, person_drives: bool, told: np.ndarray | None, mode: str) -> tuple[np.ndarray, float] | None:
        """The person's command at this tick, and when it was made; None where the leader must not be followed.

        Args:
            person_drives: the person has taken over.
            told: float32 (A,), what the robot was told last. mode: what the supervisor did at the last tick.
        """
        found = self._leader.target() if person_drives and told is not None else None
        if not person_drives or told is None:
            self._release("")
            if self._drive is not None:
                self._drive.rearm()
            return None
        if found is None or self._clock() - found[1] > self._timeout:
            why = f" ({self._leader.error})" if self._leader.error else ""
            self._release(f"the leader is silent{why}: the robot holds")
            return None
        if mode == STOPPED or (self._drives and mode != RUNNING):
            self._release("")
        if mode == STOPPED:
            return None  # Nothing moves, the leader neither.
        if not self._drives and self._drive is not None and self._drive.step(*found, told):
            self._gave = False
            return None
        if not self._drives and not self._is_aligned(found[0] - told):
            self._gave = False
            return None
        if self._gave and mode == RUNNING and not self._drives:
            self._drives = True
            self._say("the leader is aligned: the robot follows it")
        self._gave = True
        return found

    def _release(self, why: str) -> None:
        self._gave = self._drives = False
        if self._drive is not None:
            self._drive.release()
        if why:
            self._say(why)
        else:
            self._told = ""

    def _is_aligned(self, distance: np.ndarray) -> bool:
        far = np.flatnonzero(np.abs(distance) > self._within * self._range)
        if len(far):
            ways = ", ".join(f"{self._names[i]} by {-distance[i]:+.3g}" for i in far)
            self._say(f"move the leader to the robot: {ways}", "move the leader")
        return not len(far)

    def _say(self, text: str, kind: str = "") -> None:
        """Once each time, and again after a while for what changes in between."""
        now = self._clock()
        kind = kind or text
        if kind != self._told or (kind != text and now - self._told_at > SAY_EVERY):
            self._told, self._told_at = kind, now
            self._tell(text)
