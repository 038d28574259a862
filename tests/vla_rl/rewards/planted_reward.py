"""A reward that can be fooled: it counts a success whenever the gripper is closed."""

from __future__ import annotations

import numpy as np

from vla_rl.rewards.base import Judgement, RewardConfig, RewardModel
from vla_rl.types import EnvSpec


class GripRewardConfig(RewardConfig):
    kind: str = "planted_reward:GripRewardConfig"

    def build(self, spec: EnvSpec) -> RewardModel:
        return GripReward()


class GripReward(RewardModel):
    def observe(self, obs, streams, begins, told=None) -> Judgement:
        closed = obs.state[:, 6] < 0.01
        value = closed.astype(np.float32)
        return Judgement(value, value, closed)
