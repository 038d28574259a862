"""The policy server with a policy that moves on a circle, and is hostile while it is told to be.

python hostile_server.py PORT. Each line of standard input is its behavior from then on: good, nan, infinite, greatest
(float32's), alternating (from limit to limit at each action), noise (beyond the limits), or short (six numbers in place
of seven). At the first chunk of each it prints "BEHAVIOR SECONDS", monotonic.
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

CHUNK, NUMBERS = 8, 7


class Turncoat:
    """See the module."""

    def __init__(self) -> None:
        self.behavior, self.told, self.calls = "good", "good", 0
        self.rng = np.random.default_rng(0)

    def act(self, obs: Observation, generator: Any = None, temperature: float = 0.0) -> ActionChunk:
        self.calls += 1
        actions = np.zeros((obs.batch_size, CHUNK, NUMBERS), np.float32)
        angle = 0.1 * (CHUNK * self.calls + np.arange(CHUNK))
        actions[..., 0], actions[..., 1], actions[..., 6] = 0.05 * np.cos(angle), 0.05 * np.sin(angle), -1
        behavior = self.behavior
        if behavior != self.told:
            self.told = behavior
            print(behavior, time.monotonic(), flush=True)
        match behavior:
            case "good":
                pass
            case "nan":
                actions[:, 3:, 1] = np.nan
            case "infinite":
                actions[..., :6] = np.inf
            case "greatest":
                actions[..., :6] = 3.4e38
            case "alternating":
                actions[..., :6] = np.where(np.arange(CHUNK) % 2, 1.0, -1.0)[None, :, None]
            case "noise":
                actions[..., :6] = self.rng.uniform(-2, 2, actions[..., :6].shape)
            case "short":
                actions = actions[..., :6]
            case other:
                raise ValueError(f"BEHAVIOR: {other}")
        return ActionChunk(actions)

    def obey(self) -> None:
        for line in sys.stdin:
            self.behavior = line.strip()


def main() -> None:
    policy = Turncoat()
    threading.Thread(target=policy.obey, daemon=True).start()
    facts = PolicyFacts("turncoat", "1", ("agentview",), (64, 64), 8, True, CHUNK, NUMBERS, can_embed=False)
    config = ServeConfig(port=int(sys.argv[1]), max_batch=1)
    asyncio.run(run(lambda: (policy, facts), config, print))  # type: ignore[arg-type, return-value]


if __name__ == "__main__":
    main()
