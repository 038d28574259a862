"""State that the console shows: the newest tick, the failure score over time, and numbers about the loop.

The control loop writes (a reference and some numbers, never waiting), the console's own thread reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from real_robot.contract.channels import StateSource
from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import Tick

SCORE_SECONDS = 120.0
MAX_SCORES = 4096
MAX_NOTICES = 32


@dataclass(frozen=True)
class Notice:
    """One line for the page's log. `number` counts up, so that each console gets each once."""

    number: int
    time: float
    text: str


class ConsoleState:
    """See the module. An observer of ticks: call it with each. `score` takes a failure detector's.

    Args:
        detector: the failure detector's name; empty: there is none.
    """

    def __init__(self, contract: RobotContract, detector: str = "") -> None:
        self.contract, self.detector = contract, detector
        self._lock = threading.Lock()
        self._tick: Tick | None = None
        self._observed: Tick | None = None  # the newest tick with an observation
        self._last_sent: np.ndarray | None = None
        self._starts: deque[float] = deque(maxlen=64)
        self._latency = self._late = 0.0
        self._scores: deque[tuple[int, float, float, float]] = deque(maxlen=MAX_SCORES)
        self._num_scores = self._num_notices = 0
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)

    # --- written by the control loop ----------------------------------------------------------

    def __call__(self, tick: Tick) -> None:
        with self._lock:
            self._tick = tick
            self._starts.append(tick.time)
            self._latency += 0.1 * (tick.latency - self._latency)
            self._late = max(tick.late, 0.95 * self._late)
            if tick.observation is not None:
                self._observed = tick
            if tick.sent is not None and tick.sent.allowed is not None:
                self._last_sent = tick.sent.allowed

    def score(self, value: float, threshold: float) -> None:
        """A failure detector's score now, and the threshold above which it is an alarm. From any thread."""
        if not np.isfinite([value, threshold]).all():
            return
        with self._lock:
            self._num_scores += 1
            self._scores.append((self._num_scores, time.monotonic(), float(value), float(threshold)))

    def notice(self, text: str) -> None:
        """A line for the page's log. From any thread."""
        with self._lock:
            self._num_notices += 1
            self._notices.append(Notice(self._num_notices, time.time(), text[:300]))

    # --- read by the console ------------------------------------------------------------------

    @property
    def last_sent(self) -> np.ndarray | None:
        """float32 (A,), what the robot was told last (in a dry run: would have been)."""
        return self._last_sent

    @property
    def mode(self) -> str:
        """What the supervisor did at the newest tick: running, holding or stopped; "" while it was not asked."""
        tick = self._tick
        return "" if tick is None or tick.sent is None else tick.sent.mode

    @property
    def tick_age(self) -> float:
        """Seconds since the control loop was last seen; infinite before its first tick."""
        tick = self._tick
        return float("inf") if tick is None else time.monotonic() - tick.time

    def pictures(self) -> tuple[float, dict[str, np.ndarray]]:
        """(stamp, camera name -> uint8 (height, width, 3) RGB) of the newest observation."""
        tick = self._observed
        if tick is None or tick.observation is None:
            return float("-inf"), {}
        return tick.observation.stamp, tick.observation.images

    def scores(self, after: int) -> list[tuple[int, float, float, float]]:
        """(number, seconds before now, score, threshold) of those after that number."""
        now = time.monotonic()
        with self._lock:
            return [(n, now - t, v, limit) for n, t, v, limit in self._scores if n > after and now - t < SCORE_SECONDS]

    def notices(self, after: int) -> list[Notice]:
        with self._lock:
            return [n for n in self._notices if n.number > after]

    def facts(self) -> dict[str, Any]:
        """What stays: the robot's name, its numbers and their limits."""
        contract = self.contract
        return {
            "robot": contract.name,
            "rate": contract.rate,
            "dry_run": contract.safety.dry_run,
            "detector": self.detector,
            "cameras": list(contract.observation.images),
            "command": [
                {"name": d.name, "low": d.low, "high": d.high, "kind": d.kind} for d in contract.safety.dimensions
            ],
            "state": _state_facts(contract),
        }

    def numbers(self) -> dict[str, Any]:
        """What changes: the newest tick as plain numbers."""
        with self._lock:
            tick, observed, starts = self._tick, self._observed, list(self._starts)
            latency, late = self._latency, self._late
        if tick is None:
            return {}
        sent, observation = tick.sent, observed.observation if observed else None
        span = starts[-1] - starts[0]
        return {
            "step": tick.step,
            "state": _plain(observation.state) if observation else [],
            "instruction": observation.instruction if observation else "",
            "requested": _plain(tick.requested.values) if tick.requested is not None else [],
            "source": tick.requested.source if tick.requested is not None else "none",
            "sent": _plain(sent.allowed) if sent is not None and sent.allowed is not None else [],
            "limited": list(sent.limited) if sent is not None else [],
            "latency_ms": round(latency * 1000, 2),
            "late_ms": round(late * 1000, 2),
            "loop_hz": round((len(starts) - 1) / span, 2) if span > 0 else 0.0,
            "observation_ms": round((time.monotonic() - observation.stamp) * 1000) if observation else None,
        }


def _state_facts(contract: RobotContract) -> list[dict[str, Any]]:
    """Name, and limits where there are some, of each number of the state."""
    names = [name for source in contract.observation.state for name in _names(source)]
    limits: dict[int, tuple[float, float]] = {}
    for dimension in contract.safety.dimensions:
        if dimension.state is not None:
            limits[dimension.state] = (dimension.low, dimension.high)
    if box := contract.safety.workspace:
        limits |= {i: (low, high) for i, low, high in zip(box.state, box.low, box.high, strict=True)}
    return [
        {"name": name, "low": limits.get(i, (None, None))[0], "high": limits.get(i, (None, None))[1]}
        for i, name in enumerate(names)
    ]


def _names(source: StateSource) -> list[str]:
    if source.joints:
        return list(source.joints)
    if source.type == "geometry_msgs/PoseStamped":
        parts = {"position": "x y z", "quaternion": "qx qy qz qw", "axis_angle": "turn_x turn_y turn_z"}
        return [name for part in source.parts for name in parts[part].split()]
    topic = source.topic.rpartition("/")[2]
    return [topic] if source.num_values == 1 else [f"{topic} {i}" for i in range(source.num_values)]


def _plain(values: np.ndarray) -> list[float | None]:
    """JSON has no NaN."""
    flat = np.asarray(values, np.float64).ravel()[:256]
    return [round(float(v), 5) if np.isfinite(v) else None for v in flat]
