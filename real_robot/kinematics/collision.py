"""Whether a motion brings parts of the robot too near to each other, or to the cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from real_robot.kinematics.arm_model import LOOK, ArmModel
from real_robot.kinematics.pairs import Pair

MAX_POINTS = 32  # of a path
FINEST = 0.01  # meters between two looked-at points of a path, at least


class CollisionCheck:
    """Follows a path, and looks at it closely where something is near.

    Between two points that it looks at, no part can have moved farther than the room that there was, except within
    min_distance of something: there the points are a centimeter, or min_distance, apart, at most 32 on a path.

    Where two things are too near already, as when the robot is found so, they may part, not come nearer: what counts
    is the widest distance since they were first so, less 5 % of min_distance for noise.
    """

    def __init__(self, arm: ArmModel) -> None:
        self._arm = arm
        self._least = arm.config.min_distance
        self._noise = max(1e-5, 0.05 * self._least)
        self._widest: dict[Pair, float] = {}  # of pairs that are too near now

    def restart(self) -> None:
        """Forget what was near: the robot may have been moved."""
        self._widest = {}

    def trouble(self, here: np.ndarray, path: Sequence[np.ndarray]) -> str | None:
        """What comes too near on the straight ways from `here` to each point of the path, joints (N,); or None."""
        arm = self._arm
        distances = arm.distances(here)
        too_near = {pair: distance for pair, distance in distances.items() if distance < self._limit(pair)}
        self._widest = {pair: max(distance, self._widest.get(pair, -math.inf)) for pair, distance in too_near.items()}
        points = [here, *path]
        lengths = [arm.farthest(after - before) for before, after in pairwise(points)]
        finest = max(FINEST, self._least, sum(lengths) / MAX_POINTS)
        room = self._room(distances)
        for start, end, length in zip(points[:-1], points[1:], lengths, strict=True):
            done = 0.0
            while done < length:
                done = min(length, done + max(room, finest))
                distances = arm.distances(start + (end - start) * (done / length))
                if reason := self._reason(distances):
                    return reason
                room = self._room(distances)
        return None

    def _limit(self, pair: Pair) -> float:
        return 0.0 if pair in self._arm.pairs.close else self._least

    def _room(self, distances: dict[Pair, float]) -> float:
        return min((distance - self._limit(pair) for pair, distance in distances.items()), default=LOOK)

    def _reason(self, distances: dict[Pair, float]) -> str | None:
        worst: tuple[float, str] | None = None
        for (first, second), distance in distances.items():
            limit = self._limit((first, second))
            widest = self._widest.get((first, second), math.inf)
            if distance < limit and distance < widest - self._noise and (worst is None or distance < worst[0]):
                how = "would touch" if distance <= 0 else f"would come {1000 * distance:.1f} mm near"
                worst = distance, f"{first} {how} {second}, at least {1000 * limit:g} mm is allowed"
        return worst[1] if worst else None
