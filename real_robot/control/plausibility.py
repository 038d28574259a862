"""Plausibility checks of commands and of what a robot reports: joints, pose, cameras (`safety.checks`, `.dimensions`).

A sensor that lies, a joint that is blocked, a camera that hangs raise no error anywhere: they only do not fit with what
was sent, with what was seen just before, or with the contract. Each check names the stream or joint, the value and the
limit; the supervisor holds while there is trouble, and stops where it lasts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from real_robot.checks import StateCheck
from real_robot.contract.safety import DimensionLimits, SafetyConfig
from real_robot.types import Command, RobotObservation

SOURCES = ("policy", "recovery", "correction", "demo", "rewind", "hold")
SIDE = 96  # pixels, about, of a picture's height and width that are looked at
OVERLAY = 0.01  # share of a picture that a clock written into it may have
POSE_TRAVEL, JOINT_TRAVEL = 0.02, 0.05  # meters, and share of a joint's range: a robot that went so far has moved


class CommandReader:
    """Reads commands, and counts those that it refuses: NaN, infinite, of the wrong size, from nobody known.

    The rule of `safety.max_refused`: each refused command counts one. Holds, silence, and commands that came too late
    change nothing, since nothing good has come by them. The count starts anew after `max_refused` commands in a row
    that were followed, and after a person's reset.
    """

    def __init__(self, names: Sequence[str], max_refused: int) -> None:
        self._names, self._max_refused = tuple(names), max_refused
        self.num_refused, self._num_followed = 0, 0

    @property
    def is_over(self) -> bool:
        """So many were refused that the robot stops."""
        return self.num_refused >= self._max_refused

    def read(self, command: Command) -> tuple[np.ndarray | None, str | None]:
        """(values float32 (A,), None), or (what there is of them, what is wrong)."""
        values, trouble = self._check(command)
        if trouble:
            self.num_refused += 1
            self._num_followed = 0
        return values, trouble

    def note_followed(self) -> None:
        """The command read last was followed."""
        self._num_followed += 1
        if self._num_followed >= self._max_refused:
            self.num_refused = 0

    def restart(self) -> None:
        """A person allows motion again."""
        self.num_refused, self._num_followed = 0, 0

    def _check(self, command: Command) -> tuple[np.ndarray | None, str | None]:
        expected = len(self._names)
        if np.iscomplexobj(command.values):
            return None, "not numbers"
        try:
            with np.errstate(over="ignore"):
                values = np.array(command.values, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            return None, "not numbers"
        if values.shape != (expected,):
            return values, f"shape {values.shape}, expected ({expected},)"
        if not np.isfinite(values).all():
            return values, f"NaN or infinite {self._names[int(np.argmin(np.isfinite(values)))]}"
        if command.source not in SOURCES:
            return values, f"source {str(command.source)[:40]!r}, allowed: {', '.join(SOURCES)}"
        if not isinstance(command.stamp, int | float) or not math.isfinite(command.stamp):
            return values, "no stamp"
        return values, None


class CutShare:
    """How many of the last commands were cut by a limit: a policy whose unit is another is cut at nearly each tick."""

    SHARE, SECONDS = 0.25, 2.0
    LIMITS = frozenset(("bounds", "velocity", "step"))  # that a policy which knows its robot seldom meets

    def __init__(self, config: SafetyConfig) -> None:
        self._cuts: deque[bool] = deque(maxlen=math.ceil(self.SECONDS * config.control_hz))
        self._dimensions, self._is_told = config.dimensions, False

    def restart(self) -> None:
        self._cuts.clear()
        self._is_told = False

    def note(self, requested: np.ndarray, allowed: np.ndarray, limited: set[str]) -> str | None:
        """A command that was followed, (A,), and what the limits made of it. Returns, once, that too many were cut."""
        self._cuts.append(bool(limited & self.LIMITS))
        share = sum(self._cuts) / len(self._cuts)
        if len(self._cuts) < (self._cuts.maxlen or 0) or share <= self.SHARE:
            self._is_told = self._is_told and share > self.SHARE / 2
            return None
        if self._is_told or not self._cuts[-1]:
            return None
        self._is_told = True
        i = int(
            np.argmax(
                [abs(a - b) / (d.high - d.low) for a, b, d in zip(requested, allowed, self._dimensions, strict=True)]
            )
        )
        limits = self._dimensions[i]
        return (
            f"{share:.0%} of the commands of the last {self.SECONDS:g} s were cut: {limits.name} was asked for "
            f"{requested[i]:.4g} and sent {allowed[i]:.4g} (limits {limits.low:g} to {limits.high:g}). Does the policy "
            "know this robot, and its units?"
        )


def plausibility_checks(config: SafetyConfig) -> list[StateCheck]:
    """The checks of what the robot reports, as the limits say."""
    checks: list[StateCheck] = [
        MeasuredLimits(config),
        OutsideWorkspace(config),
        Jump(config),
        FollowingError(config),
        ImageSize(),
        BlackCamera(config),
        FrozenCamera(config),
    ]
    return checks


def fastest(limits: DimensionLimits, control_hz: float) -> float:
    """Units per second that a set-point goes at most."""
    speeds = [limits.max_velocity, None if limits.max_step is None else limits.max_step * control_hz]
    return min(speed for speed in speeds if speed is not None)


def _measured(config: SafetyConfig, follows: bool) -> list[tuple[DimensionLimits, int]]:
    """Positions that are measured, and the number of the state that does; all, or those that follow their set-point."""
    return [(d, d.state) for d in config.dimensions if d.state is not None and (d.follows or not follows)]


class MeasuredLimits:
    """A joint is measured beyond its limits."""

    name = "measured_limits"

    def __init__(self, config: SafetyConfig) -> None:
        self._joints, self._margin = _measured(config, follows=False), config.checks.limit_margin

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        for limits, number in self._joints:
            value, margin = float(observation.state[number]), self._margin * (limits.high - limits.low)
            if not limits.low - margin <= value <= limits.high + margin:
                return (
                    f"{limits.name} is measured at {value:.4g}, beyond its limits {limits.low:g}..{limits.high:g} by "
                    f"more than {margin:.3g}"
                )
        return None

    def restart(self) -> None: ...


class OutsideWorkspace:
    """The end effector is far outside its box, under commands that move it. (Under joint commands it stops at once.)"""

    name = "workspace"

    def __init__(self, config: SafetyConfig) -> None:
        self._box = config.workspace if config.workspace and config.workspace.commands else None
        self._margin = config.checks.workspace_margin

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        box = self._box
        if box is None:
            return None
        for axis, number, low, high in zip("xyz", box.state, box.low, box.high, strict=True):
            value = float(observation.state[number])
            if not low - self._margin <= value <= high + self._margin:
                return (
                    f"the end effector's {axis} is {value:.3f} m, outside the workspace {low:g}..{high:g} by more than "
                    f"{self._margin:g} m"
                )
        return None

    def restart(self) -> None: ...


class Jump:
    """A joint or the pose is further from where it was than it can have gone: another sensor, or one that fails.

    What has jumped is believed again when it is back where it can have gone, or after a reset.
    """

    name = "jump"

    def __init__(self, config: SafetyConfig) -> None:
        checks, box = config.checks, config.workspace
        self._tick = 1 / config.control_hz
        self._joints = _measured(config, follows=True)
        ranges = np.array([d.high - d.low for d, _ in self._joints])
        speeds = np.array([fastest(d, config.control_hz) for d, _ in self._joints])
        self._joint_speed, self._joint_margin = checks.jump_speed * speeds, checks.jump_margin * ranges
        self._numbers = np.array([number for _, number in self._joints], int)
        self._pose = None if box is None else np.array(box.state)
        self._pose_speed, self._pose_margin = checks.jump_speed * pose_speed(config), checks.pose_jump
        self._believed: tuple[float, np.ndarray] | None = None

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        before, state = self._believed, np.asarray(observation.state, np.float64)
        if before is None:
            self._believed = observation.stamp, state
            return None
        elapsed, was = max(self._tick, observation.stamp - before[0]), before[1]
        found = self._jumped(state, was, elapsed)
        self._believed = observation.stamp, was if found else state
        return found

    def _jumped(self, state: np.ndarray, was: np.ndarray, elapsed: float) -> str | None:
        way = np.abs(state - was)[self._numbers]
        limit = self._joint_speed * elapsed + self._joint_margin
        if (way > limit).any():
            i = int(np.argmax(way - limit))
            limits, number = self._joints[i]
            return (
                f"{limits.name} jumped from {was[number]:.4g} to {state[number]:.4g} in {elapsed:.3f} s, by more than "
                f"{limit[i]:.3g}"
            )
        if self._pose is not None:
            distance = float(np.linalg.norm(state[self._pose] - was[self._pose]))
            most = self._pose_speed * elapsed + self._pose_margin
            if distance > most:
                return f"the end effector jumped by {distance:.3f} m in {elapsed:.3f} s, by more than {most:.3g} m"
        return None

    def restart(self) -> None:
        self._believed = None


def pose_speed(config: SafetyConfig) -> float:
    """Meters per second that the end effector goes at most; 1.5 under joint commands, which do not say."""
    box = config.workspace
    if box is None or box.commands is None:
        return 1.5
    rows = [config.dimensions[number] for number in box.commands]
    if rows[0].kind == "position":
        return float(np.linalg.norm([fastest(d, config.control_hz) for d in rows]))
    return float(np.linalg.norm([max(-d.low, d.high) for d in rows])) * box.meters_per_unit


class FollowingError:
    """A joint is not where it was told to be: blocked, off, or another one.

    It may lag: what counts is how far it is from all set-points of the last `following_lag` seconds.
    """

    name = "following_error"

    def __init__(self, config: SafetyConfig) -> None:
        self._lag = config.checks.following_lag
        index = {d.name: i for i, d in enumerate(config.dimensions)}
        self._joints = [
            (index[d.name], d.name, number, d.max_following_error or fastest(d, config.control_hz) / 4)
            for d, number in _measured(config, follows=True)
        ]
        self._sent: deque[tuple[float, np.ndarray]] = deque()

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        if sent is None or not self._joints:
            self._sent.clear()
            return None
        self._sent.append((observation.stamp, sent))
        while len(self._sent) > 1 and self._sent[1][0] <= observation.stamp - self._lag:
            self._sent.popleft()
        window = np.array([values for _, values in self._sent])
        for i, name, number, most in self._joints:
            value, low, high = float(observation.state[number]), window[:, i].min(), window[:, i].max()
            if not low - most <= value <= high + most:
                error = max(low - value, value - high)
                return (
                    f"{name} is at {value:.4g} and was sent to {sent[i]:.4g}: {error:.3g} from all that was sent in "
                    f"{self._lag:g} s, limit {most:.3g} (max_following_error; a gripper that closes on things needs "
                    "follows: false)"
                )
        return None

    def restart(self) -> None:
        self._sent.clear()


class ImageSize:
    """A camera's pictures have another size than at first."""

    name = "image_size"

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, ...]] = {}

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        for camera, picture in observation.images.items():
            first = self._sizes.setdefault(camera, picture.shape)
            if picture.shape != first:
                return f"camera {camera}: pictures of {_size(picture.shape)}, at first of {_size(first)}"
        return None

    def restart(self) -> None: ...  # a camera does not change its size between two episodes


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(str(side) for side in shape[:2])


def sampled(picture: np.ndarray) -> np.ndarray:
    """Some rows and columns of a picture: a view of about SIDE x SIDE pixels."""
    return picture[:: max(1, picture.shape[0] // SIDE), :: max(1, picture.shape[1] // SIDE)]


class BlackCamera:
    """A camera shows nothing: covered, or its exposure failed."""

    name = "black_camera"

    def __init__(self, config: SafetyConfig) -> None:
        self._below = config.checks.black_below

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        for camera, picture in observation.images.items():
            brightness = float(sampled(picture)[::4, ::4].mean()) if picture.size else 0.0
            if brightness < self._below:
                return f"camera {camera} is black: mean brightness {brightness:.1f} of 255, limit {self._below:g}"
        return None

    def restart(self) -> None: ...


def measured_motion(config: SafetyConfig) -> tuple[list[int], np.ndarray]:
    """The numbers of the state, M, that tell whether the robot moves, and how far each goes, (M,), before it has."""
    box, joints = config.workspace, _measured(config, follows=True)
    numbers = [*([] if box is None else box.state), *(number for _, number in joints)]
    pose = [] if box is None else [POSE_TRAVEL] * 3
    return numbers, np.array([*pose, *(JOINT_TRAVEL * (d.high - d.low) for d, _ in joints)])


class FrozenCamera:
    """A camera shows the same pixels, to the last bit, for long while the robot is measured to move.

    What changes within a box of OVERLAY of the picture that does not grow, as a clock that is written into it, counts
    for nothing. A robot that stands may be seen unchanged, as in a renderer; one whose motion is not measured is not
    judged.
    """

    name = "frozen_camera"

    def __init__(self, config: SafetyConfig) -> None:
        self._after = config.checks.frozen_after
        self._numbers, self._travel = measured_motion(config)
        self._seen: dict[str, _Still] = {}

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        if not self._after or not self._numbers:
            return None
        where, found = np.asarray(observation.state, np.float64)[self._numbers], None
        for camera, picture in observation.images.items():
            pixels = sampled(picture)
            before = self._seen.get(camera)
            if before is None or not before.lasts(pixels):
                self._seen[camera] = _Still(pixels, observation.stamp, where)
                continue
            if before.has_grown:  # something small moves in it
                before.begin(observation.stamp, where)
            seconds = observation.stamp - before.since
            if seconds > self._after and (before.travel(where) > self._travel).any():
                found = found or (
                    f"camera {camera} has shown the same picture for {seconds:.1f} s while the robot moved, limit "
                    f"{self._after:g} s"
                )
        return found

    def restart(self) -> None:
        self._seen.clear()


class _Still:
    """A picture that has not changed since, but for a small box in it, and where the robot has been meanwhile."""

    def __init__(self, pixels: np.ndarray, since: float, where: np.ndarray) -> None:
        self.pixels, self.has_grown, self._size = pixels.copy(), False, 0
        self._changed = np.zeros(pixels.shape[:2], bool)
        self.begin(since, where)

    def begin(self, since: float, where: np.ndarray) -> None:
        """Count from now on."""
        self.since, self._low, self._high = since, where, where

    def lasts(self, pixels: np.ndarray) -> bool:
        """The next picture is the same, but for the box."""
        if pixels.shape != self.pixels.shape:
            return False
        self.has_grown = False
        if np.array_equal(pixels, self.pixels):
            return True
        self._changed |= (pixels != self.pixels).reshape(*self._changed.shape, -1).any(-1)
        sides = [np.flatnonzero(self._changed.any(axis)) for axis in (0, 1)]
        size = math.prod(int(side[-1] - side[0]) + 1 for side in sides)
        self.has_grown, self._size = size > self._size, size
        return size <= OVERLAY * self._changed.size

    def travel(self, where: np.ndarray) -> np.ndarray:
        """How far each number that tells of motion has gone."""
        self._low, self._high = np.minimum(self._low, where), np.maximum(self._high, where)
        return self._high - self._low
