"""`vla-rl deploy --log`: every tick of the control loop as a line of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import numpy as np

from real_robot.control.robot_loop import Tick
from real_robot.failure.watch import FailureWatch


class TickLog:
    """Every tick as a JSON line: what was asked, what was sent, why. Written line by line, whole after a crash."""

    def __init__(self, path: Path, watch: FailureWatch | None = None) -> None:
        self._path, self._watch = path, watch
        self._file: TextIO | None = None

    def __enter__(self) -> TickLog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", buffering=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, tick: Tick) -> None:
        assert self._file is not None, "used as a context manager"
        sent, requested = tick.sent, tick.requested
        line = {
            "time": tick.time,
            "step": tick.step,
            "stamp": tick.observation.stamp if tick.observation else None,
            "source": requested.source if requested else None,
            "requested": _plain(requested.values) if requested else None,
            "sent": _plain(sent.values) if sent and sent.values is not None else None,
            "mode": sent.mode if sent else "waiting" if tick.operator_command.active else "inactive",
            "limited": list(sent.limited) if sent else [],
            "late": round(tick.late, 6),
            "latency": round(tick.latency, 6),
        }
        if self._watch is not None:
            line["failure"] = self._watch.score
        self._file.write(json.dumps(line) + "\n")


def _plain(values: np.ndarray) -> list[float | str]:
    """JSON has no NaN."""
    return [float(v) if np.isfinite(v) else str(v) for v in values]
