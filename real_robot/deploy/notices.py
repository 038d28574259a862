"""What deploy tells of while it runs: how long the robot held and why, and cameras that do not answer the arm.

A camera that is covered, or shows something else, changes no more while the robot moves than at rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from real_robot.checks import without_numbers
from real_robot.contract.safety import SafetyConfig
from real_robot.control.plausibility import measured_motion, sampled
from real_robot.control.robot_loop import Tick
from real_robot.control.supervisor import HOLDING, STOPPED, Supervisor

WINDOW = 10.0  # seconds that a share is of
SHARE = 0.1  # of a window's ticks, below which a cause is not worth a line
AGAIN = 60.0  # seconds before a cause is told again
APART = 0.25  # seconds between two pictures that are compared
BLOCKS = 12  # of each side of a picture, over which changes are averaged
MOVES, RESTS = 0.5, 0.05  # of `measured_motion`'s travel, between two pictures: above, the robot moves; below, it rests
ENOUGH, FEW = 20, 4  # pairs of pictures while it moves, and at rest, before a camera is judged
ANSWER = 2.0  # gray levels of 255 by which some block must change more while the robot moves


class HeldTicks:
    """An observer of the loop's ticks. A hold that a person or a failure detector asked for does not count.

    Args:
        warms_up: whether the policy still computes its very first actions; that is told at once.
        tell: a line for a person.
    """

    def __init__(self, supervisor: Supervisor, warms_up: Callable[[], bool], tell: Callable[[str], object]) -> None:
        self._supervisor, self._warms_up, self._tell = supervisor, warms_up, tell
        self._begun: float | None = None
        self._ticks = 0
        self._held: Counter[str] = Counter()
        self._words: dict[str, str] = {}  # the newest reason of each cause, with its numbers
        self._told: dict[str, float] = {}  # when
        self._is_warming = False

    def __call__(self, tick: Tick) -> None:
        wanted = tick.operator_command
        rests = not wanted.active or tick.sent is None or tick.sent.mode == STOPPED
        if rests or (wanted.command is not None and wanted.command.source == "hold"):
            return
        self._begun = tick.time if self._begun is None else self._begun
        self._ticks += 1
        if self._supervisor.state.mode == HOLDING:
            self._note(tick)
        if tick.time - self._begun >= WINDOW:
            self._tell_shares(tick.time)

    def _note(self, tick: Tick) -> None:
        reason = self._supervisor.state.reason
        if tick.requested is not None and tick.requested.source == "hold":
            is_warming = self._warms_up()
            if is_warming and not self._is_warming:
                self._tell("warming up: the policy computes its first actions; the robot begins by itself")
            self._is_warming = is_warming
            reason = "the policy warms up" if is_warming else "the policy had no action in time"
        cause = without_numbers(reason)
        self._held[cause] += 1
        self._words[cause] = reason

    def _tell_shares(self, now: float) -> None:
        for cause, number in self._held.most_common():
            share = number / self._ticks
            if share > SHARE and now - self._told.get(cause, -AGAIN) >= AGAIN:
                self._told[cause] = now
                self._tell(f"held {share:.0%} of {self._ticks} ticks: {self._words[cause]}")
        self._begun, self._ticks = None, 0
        self._held.clear()


class Repetition:
    """What was said three times of late is left to the shares of `HeldTicks`."""

    TIMES = 3

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._said = clock, dict[str, list[float]]()

    def is_over(self, text: str) -> bool:
        """Note that something is to be said; whether it was said often enough."""
        now, key = self._clock(), without_numbers(text)
        said = [moment for moment in self._said.get(key, []) if now - moment < WINDOW]
        is_over = len(said) >= self.TIMES
        self._said[key] = said if is_over else [*said, now]
        return is_over


class _Camera:
    """A camera's mean change of each block, while the robot moves and while it rests."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.before = blocks
        self.sums, self.counts = np.zeros((2, *blocks.shape[:2])), [0, 0]
        self.is_told = False


class CameraAnswers:
    """An observer of the loop's ticks. It tells, and holds nothing: a camera may be meant to see no arm.

    Args:
        tell: called once with each camera that does not answer, until it does.
    """

    def __init__(self, config: SafetyConfig, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._numbers, self._travel = measured_motion(config)
        self._cameras: dict[str, _Camera] = {}
        self._before: tuple[float, np.ndarray] | None = None

    def __call__(self, tick: Tick) -> None:
        seen = tick.observation
        if seen is None or not self._numbers:
            return
        where = np.asarray(seen.state, np.float64)[self._numbers]
        if self._before is not None and 0 <= seen.stamp - self._before[0] < APART:
            return
        (stamp, was), self._before = self._before or (seen.stamp, where), (seen.stamp, where)
        way = float((np.abs(where - was) / self._travel).max())
        moves = None if seen.stamp - stamp > 2 * APART or RESTS < way < MOVES else way >= MOVES
        for name, picture in seen.images.items():
            self._compare(name, sampled(picture).astype(np.float32).mean(-1), moves)

    def _compare(self, name: str, gray: np.ndarray, moves: bool | None) -> None:
        camera = self._cameras.get(name)
        if camera is None or camera.before.shape != gray.shape:
            self._cameras[name] = _Camera(gray)
            return
        change, camera.before = _blocks(np.abs(gray - camera.before)), gray
        if moves is None:
            return
        if camera.sums.shape[1:] != change.shape:
            camera.sums = np.zeros((2, *change.shape))
        camera.sums[int(moves)] += change
        camera.counts[int(moves)] += 1
        rests, moved = camera.counts
        if rests >= FEW and moved >= ENOUGH:
            more = float((camera.sums[1] / moved - camera.sums[0] / rests).max())
            if more < ANSWER and not camera.is_told:
                self._tell(
                    f"alarm: camera {name} does not answer the arm's motion: in {moved * APART:g} s of it the picture "
                    "changed no more than at rest. Is it turned away, covered, or another camera?"
                )
            camera.is_told = more < ANSWER
            camera.sums[1], camera.counts[1] = 0, 0


def _blocks(change: np.ndarray) -> np.ndarray:
    """float32 (BLOCKS, BLOCKS), the means of a picture's blocks; fewer of one that is smaller."""
    height, width = (max(1, side // BLOCKS) for side in change.shape)
    rows, columns = change.shape[0] // height, change.shape[1] // width
    return change[: rows * height, : columns * width].reshape(rows, height, columns, width).mean((1, 3))
