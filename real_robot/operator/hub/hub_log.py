"""The hub's log, a JSON line each, and the shares of time that come out of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from vla_rl.config import ConfigError


class HubLog:
    """Appends `{"time": ..., "at": ..., "event": ..., ...}` to a file, whole lines, at once. From any thread.

    What a crash, or a full disk, has left of a last line is taken off first.

    Args:
        path: None: nowhere.
        clock: monotonic seconds, for `at`; `time` is the wall clock, seconds since the epoch.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(path)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def __call__(self, event: str, **fields: Any) -> None:
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
        line = {"time": round(time.time(), 3), "at": round(self._clock(), 3), "event": event, **rounded}
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """End the file. May be called twice."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_cut_line(path: Path) -> None:
    """Else the next event would be written behind it, and the log could not be read any more."""
    head, _, tail = (path.read_bytes() if path.is_file() else b"").rpartition(b"\n")
    if tail.startswith(b'{"time": '):  # Else it is not ours.
        os.truncate(path, len(head) + 1 if head else 0)


@dataclass(frozen=True)
class Shares:
    """How a person's and the robots' time was spent; seconds.

    Attributes:
        seconds: from a hub's first event to its last, of all hubs that wrote the log.
        helped: the person was with a robot.
        requests: how often a robot began to wait. served: of these, those that the person came to.
        mean_wait, max_wait: of the served; 0 without any.
        waited: of all robots together, those that were not served included. by_robot: robot -> seconds helped.
    """

    seconds: float
    helped: float
    requests: int
    served: int
    mean_wait: float
    max_wait: float
    waited: float
    by_robot: dict[str, float]

    @property
    def person(self) -> float:
        """Share of the time in which the person was with a robot."""
        return self.helped / self.seconds if self.seconds > 0 else 0.0

    def lines(self) -> list[str]:
        """For the console."""
        return [
            f"time: {self.seconds:.0f} s, the person with a robot: {100 * self.person:.1f} %",
            f"requests: {self.requests}, of these helped: {self.served}",
            f"waiting: mean {self.mean_wait:.1f} s, longest {self.max_wait:.1f} s",
            *(f"  with {robot}: {seconds:.0f} s" for robot, seconds in sorted(self.by_robot.items())),
        ]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a last line that a crash has cut is left out.

    Raises:
        ConfigError: no such file, or it is no hub's log.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `vla-rl hub serve --log {path}` writes one") from error
    whole, events = lines[:-1], []
    for number, line in enumerate(whole, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not {"at", "event"} <= set(event):
                raise ValueError("no object with at and event")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not a line of a hub's log ({error})") from None
        events.append(event)
    return events


def shares(events: Iterable[dict[str, Any]]) -> Shares:
    """Add up a log's events, in the order in which they happened. A person who is with a robot at the end counts.

    Each "begin" is another hub's: what lies between the last word of one that was killed and the next is no time of it.
    """
    events = list(events)
    if not events:
        return Shares(0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, {})
    waits: list[float] = []
    waited, requests = 0.0, 0
    by_robot: dict[str, float] = {}
    open_help: tuple[str, float] | None = None
    seconds, last = 0.0, events[0]["at"]

    def close_help() -> None:
        if open_help is not None:
            robot, since = open_help
            by_robot[robot] = by_robot.get(robot, 0.0) + last - since

    for event in events:
        if event["event"] == "begin":
            close_help()
            open_help = None
        else:
            seconds += event["at"] - last
        last = event["at"]
        match event["event"]:
            case "asked":
                requests += 1
            case "withdrawn":
                waited += event["waited"]
            case "helping":
                open_help = (event["robot"], event["at"])
                if event["asked"]:
                    waits.append(event["waited"])
            case "handed_back":
                by_robot[event["robot"]] = by_robot.get(event["robot"], 0.0) + event["helped"]
                open_help = None
    close_help()
    mean = sum(waits) / len(waits) if waits else 0.0
    return Shares(
        seconds=seconds,
        helped=sum(by_robot.values()),
        requests=requests,
        served=len(waits),
        mean_wait=mean,
        max_wait=max(waits, default=0.0),
        waited=waited + sum(waits),
        by_robot=by_robot,
    )
