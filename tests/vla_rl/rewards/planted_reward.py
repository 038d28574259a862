"""A reward that can be fooled: it counts a success whenever the gripper is closed."""

from __future__ import annotations

import numpy as np

from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel
from vla_rl.types import EnvSpec


class GripRewardConfig(RewardConfig):
    kind: str = "planted_reward:GripRewardConfig"
    every: int | None = None

    def build(self, spec: EnvSpec) -> RewardModel:
        return GripReward(self.every)


class GripReward(RewardModel):
    """Attributes: asked: how often it was asked of each stream since its episode began, that beginning left out."""

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.asked: dict[int, int] = {}

    def observe(self, obs, streams, begins, told=None) -> Judgement:
        closed = obs.state[:, 6] < 0.01
        value = closed.astype(np.float32)
        for stream, new in zip(streams, begins, strict=True):
            self.asked[stream] = 0 if new else self.asked[stream] + 1
        return Judgement(value, value, closed)
