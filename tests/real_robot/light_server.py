"""The policy server with a policy of numpy alone, which starts at once and misbehaves on demand.

python light_server.py PORT BEHAVIOR, where BEHAVIOR is normal, long (chunks of eight seconds), slow, late, warms, wild,
second (another policy, which does the same), joints (of an SO-101), or "reach A B ...", which asks for these.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import numpy as np

from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import ServeConfig, run
from vla_rl.types import ActionChunk, Observation

CHUNK = 8
SPEED = 0.05
LONG = 80  # actions
WARMS = 6.0  # seconds that the first chunk takes of a policy that compiles when it is asked first
LATE = 1.5  # seconds that a late policy takes for each chunk


class Circles:
    """Moves the gripper on a circle; `behavior` says what else it does."""

    def __init__(self, behavior: str) -> None:
        self.behavior = behavior
        self.angle = 0.0
        self.calls = 0

    def act(self, obs: Observation, generator: Any = None, temperature: float = 0.0) -> ActionChunk:
        self.calls += 1
        if self.behavior == "slow" and self.calls > 4:  # after the warm-up
            time.sleep(30)
        if self.behavior == "late" and self.calls > 4:
            time.sleep(LATE)
        if self.behavior == "warms" and self.calls == 5:
            time.sleep(WARMS)
        length = LONG if self.behavior == "long" else CHUNK
        actions = np.zeros((obs.batch_size, length, 7), np.float32)
        for i in range(length):
            self.angle += 0.1
            actions[:, i, 0], actions[:, i, 1] = SPEED * np.cos(self.angle), SPEED * np.sin(self.angle)
        actions[..., 6] = -1
        if self.behavior == "wild":
            actions[..., :3] *= 1e6
        return ActionChunk(actions)


class Sways:
    """Six joints in degrees: the first sways further and faster than is allowed, the others stay at zero."""

    def __init__(self) -> None:
        self.angle = 0.0

    def act(self, obs: Observation, generator: Any = None, temperature: float = 0.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, CHUNK, 6), np.float32)
        for i in range(CHUNK):
            self.angle += 0.1
            actions[:, i, 0] = 170 * np.sin(self.angle)
        return ActionChunk(actions)


class Reaches:
    """Asks for the same joints, until a line of standard input names others."""

    def __init__(self, goal: list[str]) -> None:
        self.goal = np.array(goal, np.float32)
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        for line in sys.stdin:
            self.goal = np.array(line.split(), np.float32)

    def act(self, obs: Observation, generator: Any = None, temperature: float = 0.0) -> ActionChunk:
        return ActionChunk(np.tile(self.goal, (obs.batch_size, CHUNK, 1)))


def main() -> None:
    behavior, *goal = sys.argv[2].split()
    if behavior == "reach":
        size = len(goal)
        policy = Reaches(goal)
        facts = PolicyFacts("reaches", "1", (), (64, 64), size, True, CHUNK, size, can_embed=False)
    elif sys.argv[2] == "joints":
        policy, facts = Sways(), PolicyFacts("sways", "1", (), (64, 64), 6, True, CHUNK, 6, can_embed=False)
    else:
        policy = Circles(sys.argv[2])
        version = "2" if policy.behavior == "second" else "1"
        facts = PolicyFacts("circles", version, ("agentview",), (64, 64), 8, True, CHUNK, 7, can_embed=False)
    config = ServeConfig(port=int(sys.argv[1]), max_batch=1)
    asyncio.run(run(lambda: (policy, facts), config, print))  # type: ignore[arg-type, return-value]


if __name__ == "__main__":
    main()
