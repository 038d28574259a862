"""Kinds of `env.reward`: a learned reward, or the simulator's own success. Imports no torch before it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vla_rl.rewards.base import RewardConfig, RewardModel, ToldReward
from vla_rl.types import EnvSpec


class SimulatorRewardConfig(RewardConfig):
    """The simulator's own success, by the same way as a learned one: seen where a chunk ends."""

    kind: Literal["simulator"] = "simulator"

    def build(self, spec: EnvSpec) -> RewardModel:
        """See `RewardConfig.build`."""
        return ToldReward()


class LearnedRewardConfig(RewardConfig):
    """A network that `vla-rl reward fit` has fitted."""

    kind: Literal["learned"] = "learned"
    path: Path = Field(description="The folder `reward` in the run's folder of `vla-rl reward fit`.")

    def build(self, spec: EnvSpec) -> RewardModel:
        """See `RewardConfig.build`."""
        from vla_rl.rewards.model import LearnedReward

        model = LearnedReward.load(self.path)
        model.check_spec(spec)
        return model
