"""What a scripted person observes of one `vla-rl robot sim`, and how it resets its scene: a process on its ROS graph.

    python scripts/sim_observer.py MASTER

Writes a JSON line for each thing that is seen: `{"expert": [...]}` (what /expert/command says) or `{"episode": {...}}`
(/episode/state). Reads JSON lines, each the start of an episode, and publishes them on /episode/start: what a person
does who lays out the scene anew. It is a process, since rospy allows one node a process, and one graph a node.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.bridge.robot import LATCHED
from real_robot.transports.base import QosConfig
from real_robot.transports.messages import Float64MultiArray, Message, String
from real_robot.transports.ros1 import Ros1Config
from vla_rl.common.child_process import end_child, start_child
from vla_rl.types import EpisodeSpec

AGAIN = 0.5  # seconds after which the start of an episode is said again: the simulator may not have heard it


@dataclass(frozen=True)
class SceneView:
    """What a person sees of one robot.

    Attributes:
        episode: number of the episode that runs, 0 before the first. is_over: it has ended.
        twist: float64 (6,), what the person would do next: m/s and rad/s. grip: below 0 open, above close.
        remaining: about how many control steps that would still take; infinite: it cannot be done.
        number: counts the expert's words. at: when the newest came, monotonic seconds.
    """

    episode: int = 0
    is_over: bool = True
    twist: np.ndarray | None = None
    grip: float = 0.0
    remaining: float = math.inf
    number: int = 0
    at: float = float("-inf")


class SceneObserver:
    """The process, seen from the person's. `sight` may be read from any thread.

    Args:
        master: address of the ROS master that the robot is on.
    """

    def __init__(self, master: str) -> None:
        own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
        command = [sys.executable, "-m", Path(__file__).stem, master]
        self._process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own)
        self._episode: dict[str, Any] = {}
        self._expert: tuple[list[float], int, float] = ([], 0, float("-inf"))
        self._wanted, self._asked = 0, float("-inf")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "a pipe"
        for line in self._process.stdout:
            seen = json.loads(line)
            if "expert" in seen:
                self._expert = (seen["expert"], self._expert[1] + 1, time.monotonic())
            else:
                self._episode = seen["episode"]

    @property
    def is_open(self) -> bool:
        """The process is there."""
        return self._process.poll() is None

    @property
    def sight(self) -> SceneView:
        """What is seen now."""
        values, number, at = self._expert
        episode, is_over = int(self._episode.get("id", 0)), bool(self._episode.get("done", True))
        if not values:
            return SceneView(episode, is_over)
        return SceneView(episode, is_over, np.array(values[:6]), values[6], values[7], number, at)

    def lay_out(self, number: int, spec: EpisodeSpec) -> None:
        """Lay out the scene of an episode; its number is in `sight` once that is done. Call it until then."""
        now = time.monotonic()
        if number == self._wanted and now - self._asked < AGAIN:
            return
        self._wanted, self._asked = number, now
        told = {"id": number, "task": spec.task, "split": spec.split, "index": spec.index}
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process. May be called twice."""
        end_child(self._process, seconds=5)


def _look(master: str) -> None:
    """Be the process."""
    lock = threading.Lock()

    def show(what: str, value: Any) -> None:
        with lock:
            sys.stdout.write(json.dumps({what: value}) + "\n")
            sys.stdout.flush()

    def on_expert(message: Message) -> None:
        assert isinstance(message, Float64MultiArray)
        show("expert", [float(value) for value in message.data])

    def on_episode(message: Message) -> None:
        assert isinstance(message, String)
        show("episode", json.loads(message.data))

    transport = Ros1Config(master=master, host="127.0.0.1").open("scripted_person")
    start = transport.advertise("/episode/start", String, QosConfig(depth=10))
    transport.subscribe("/episode/state", String, LATCHED, on_episode)
    transport.subscribe("/expert/command", Float64MultiArray, QosConfig(), on_expert)
    for line in sys.stdin:
        start(String(data=line.strip()))
    os._exit(0)  # rospy's threads would keep it


if __name__ == "__main__":
    _look(sys.argv[1])
