"""The motion check: whether the end effector goes where the sent velocities lead, and its lag and gain."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from real_robot.contract.safety import SafetyConfig
from real_robot.types import RobotObservation

MOTION_WINDOW = 0.8  # seconds of motion that are compared with what was sent
ENOUGH = 0.03  # meters of motion from which lag and gain are fitted
UNKNOWN_GAIN, UNKNOWN_DELAY = 2.5, 0.1  # of a robot that has not moved for a second yet; seconds


class VelocityFollowing:
    """The end effector does not go where the sent velocities lead: blocked, inverted, another axis, another unit.

    What was sent between two observations is known but for the robot's lag: it lies between the least and the most of
    all stretches of the sent velocities that end up to `following_lag` earlier. What is measured may be
    `motion_tolerance` times more or less than that, and `motion_margin` beside. Time is counted in ticks, so that
    robots in lockstep are judged too. Once the robot has moved for a second, its own lag and gain are known.

    Attributes:
        gain, delay: how many times as far as it is told it may go, and how many seconds later. What brakes before the
            workspace's sides counts with them.
    """

    name = "motion"

    def __init__(self, config: SafetyConfig) -> None:
        box, checks = config.workspace, config.checks
        self._commands = list((box and box.commands) or ())
        is_twist = bool(self._commands) and config.dimensions[self._commands[0]].kind == "velocity"
        self._box = box if is_twist and checks.motion_tolerance else None
        self._tick, self._tolerance, self._margin = 1 / config.control_hz, checks.motion_tolerance, checks.motion_margin
        self._most_lag = math.ceil(checks.following_lag / self._tick)
        self._second = math.ceil(1 / self._tick)
        self._backs = np.unique(np.geomspace(1, math.ceil(MOTION_WINDOW / self._tick), 10).astype(int))  # observations
        self._sent: deque[tuple[float, np.ndarray]] = deque(maxlen=2 * self._second + 2 * self._most_lag)
        self._seen: deque[tuple[int, np.ndarray]] = deque(maxlen=self._second + 1)
        self._num_sent = self._num_unsent = 0  # values so far; observations since the last
        self._blocked_at = -2 * self._second
        self._astray: str | None = None
        self._forget_robot()

    def _forget_robot(self) -> None:
        self._lag = min(self._most_lag, math.ceil(2 * UNKNOWN_DELAY / self._tick))
        self.gain, self.delay = (UNKNOWN_GAIN, UNKNOWN_DELAY) if self._box else (1.0, 0.0)

    def restart(self) -> None:
        self._sent.clear()
        self._seen.clear()
        if self._astray is not None:
            self._astray = None
            self._forget_robot()

    def remember(self, values: np.ndarray, now: float) -> None:
        """What was sent now, float64 (A,)."""
        if self._box is None:
            return
        if self._sent and now - self._sent[-1][0] > 1.0:
            self.restart()
        self._sent.append((now, values[self._commands] * self._box.meters_per_unit))
        self._num_sent, self._num_unsent = self._num_sent + 1, 0

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        self._num_unsent += 1
        if self._box is None or sent is None or not self._sent or self._num_unsent > 3:
            return self._astray
        self._seen.append((self._num_sent, np.asarray(observation.state, np.float64)[list(self._box.state)]))
        speeds = np.array([speed for _, speed in self._sent])
        lasted = np.diff([time for time, _ in self._sent], append=self._sent[-1][0])
        as_told, until_next = _ways(speeds, self._tick), _ways(speeds, np.clip(lasted, self._tick, 1.0)[:, None])
        if self.gain == UNKNOWN_GAIN:
            self._identify(as_told)
        return self._astray or self._compare((as_told, until_next))

    def _up_to(self, ways: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Where the first so many sent values lead; it stood before the oldest that is remembered."""
        return ways[np.clip(numbers - self._num_sent + len(self._sent), 0, None)]

    def _compare(self, paths: tuple[np.ndarray, np.ndarray]) -> str | None:
        """What is wrong with the motion between some observation and the newest, axis by axis."""
        backs = self._backs[self._backs < len(self._seen)]
        if not len(backs):
            return None
        numbers = np.array([self._seen[-1 - back][0] for back in backs])
        moved = self._seen[-1][1] - np.array([self._seen[-1 - back][1] for back in backs])
        newest, lags = self._seen[-1][0], np.arange(self._lag + 1)[:, None]
        told = np.array(
            [
                self._up_to(path, newest - lags - last) - self._up_to(path, numbers - lags - first)
                for path in paths
                for last, first in ((0, 0), (0, 1), (1, 0))  # observations are a tick early or late
            ]
        )  # (paths and jitter, lags, windows, axes)
        low, high = told.min((0, 1)), told.max((0, 1))
        least = np.where(low > 0, low / self._tolerance, low * self._tolerance) - self._margin
        most = np.where(high > 0, high * self._tolerance, high / self._tolerance) + self._margin
        is_told = np.maximum(-low, high).max(-1, keepdims=True) > self._margin / 10  # else somebody moves it by hand
        wrong = np.where(is_told, np.maximum(least - moved, moved - most), 0.0)
        if wrong.max() <= 0:
            return None
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        way, lowest, highest = (1000 * float(part[at]) for part in (moved, low, high))
        is_short = -1000 * self._margin < way < lowest or highest < way < 1000 * self._margin
        what = "blocked, or slower than told" if is_short else "told in another direction, axis or unit"
        text = (
            f"the end effector went {way:+.0f} mm along {'xyz'[at[1]]} where it was sent {lowest:+.0f} to "
            f"{highest:+.0f} mm: it is {what} (checks.motion_tolerance, motion_margin)"
        )
        if is_short:
            self._blocked_at = self._num_sent
        elif self._num_sent - self._blocked_at > self._second:  # else it springs back from what it was pressed against
            self._astray = text  # until a person resets
        return text

    def _identify(self, path: np.ndarray) -> None:
        """Fit lag and gain to the motion so far, once it is enough and they explain it."""
        if len(self._seen) < self._second or np.linalg.norm(np.ptp(path, axis=0)) < ENOUGH:
            return
        numbers, places = np.array([number for number, _ in self._seen]), np.array([place for _, place in self._seen])
        moved, fits = places - places[0], []
        for lag in range(self._most_lag + 1):
            told = self._up_to(path, numbers - lag) - self._up_to(path, numbers[:1] - lag)
            gain = float((told * moved).sum() / max(1e-12, (told * told).sum()))
            fits.append((float(((moved - gain * told) ** 2).sum()), lag, gain))
        error, lag, gain = min(fits)
        if error < 0.1 * float((moved * moved).sum()):
            self._lag, self.delay = min(self._most_lag, 2 * lag + 1), lag * self._tick
            self.gain = min(max(gain, 1.0), 0.99 * UNKNOWN_GAIN)


def _ways(speeds: np.ndarray, seconds: float | np.ndarray) -> np.ndarray:
    """Where the first 0, 1, 2, ... of these speeds lead."""
    return np.concatenate([np.zeros((1, 3)), np.cumsum(speeds * seconds, axis=0)])
