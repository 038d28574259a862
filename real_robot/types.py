"""Observations and commands between a robot, its policy and its supervisor (one robot, no batch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class RobotObservation:
    """What one robot saw at one time.

    Attributes:
        images: camera name -> uint8 (height, width, 3), upright RGB.
        state: float32 (S,), proprioception, in the robot contract's order and units.
        instruction: what the robot is asked to do.
        stamp: seconds on the robot process's monotonic clock, of the oldest part it was assembled from.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    instruction: str
    stamp: float


@dataclass(frozen=True)
class Command:
    """One action that somebody asks of the robot.

    Attributes:
        values: float32 (A,), in the contract's units.
        source: who asks: policy, recovery, correction, demo, rewind or hold.
        stamp: seconds on the robot process's monotonic clock when it was asked.
    """

    values: np.ndarray
    source: str
    stamp: float


class Deadman(NamedTuple):
    """The last word from a deadman switch. It stands only for as long as it is young: see `safety.deadman_timeout`.

    Attributes:
        pressed: the switch was held.
        heard: seconds on the robot process's monotonic clock when that word was received; -inf: never.
    """

    pressed: bool
    heard: float
