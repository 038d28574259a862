"""Whether what is asked can be a command at all, and how often it could not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from real_robot.types import Command

SOURCES = ("policy", "recovery", "correction", "demo", "rewind", "hold")


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
