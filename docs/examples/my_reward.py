"""A reward of your own, named as `env: {reward: {kind: "my_reward:NearConfig"}}`: near the mark counts as a success."""

from typing import Literal

import numpy as np
from pydantic import Field

from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel


class NearConfig(RewardConfig):
    """Pays a slider (my_env.py) that is near its mark, whatever the simulator calls a success, and ends its episode."""

    kind: Literal["my_reward:NearConfig"] = "my_reward:NearConfig"
    near: float = Field(0.15, gt=0, description="Within this distance it counts.")

    def build(self, spec):
        return Near(self.near)


class Near(RewardModel):  # The state is (place, mark). Asked every `every` control steps, None: after each chunk.
    def __init__(self, near: float) -> None:
        self.near, self.farthest = near, dict[int, float]()

    def observe(self, obs, streams, begins, told=None):
        """Judge B episodes by what they show now; a `stream` is the same one until `begins` says that it is new."""
        distance = np.abs(obs.state[:, 0] - obs.state[:, 1])
        for stream, begin, now in zip(streams, begins, distance, strict=True):
            self.farthest[stream] = max(now, 0.0 if begin else self.farthest[stream])
        progress = 1 - distance / np.maximum([self.farthest[stream] for stream in streams], 1e-6)
        counts = distance < self.near
        return Judgement(counts.astype(np.float32), progress.astype(np.float32), counts)
