"""Options of a world model's action values (see world_model/env/action_values.py). Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.algorithms.action_values import ActionValues, ActionValuesConfig
from vla_rl.interfaces import Policy


class WorldModelValuesConfig(ActionValuesConfig):
    """An action chunk is worth the probability of success that a world model gives, having imagined what it does."""

    kind: Literal["world_model"] = "world_model"
    path: str | Path = Field(
        description="A world model's folder, or pretrained:NAME, fitted on none of the episodes that it values."
    )
    chunks_ahead: PositiveInt = Field(
        default=1, description="Chunks imagined: the action chunk, then what the policy does next, greedily."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(default="auto", description="Of the world model's networks.")
    batch_size: PositiveInt = Field(default=256, description="Chunks imagined at once, about; bounds the memory.")
    seed: NonNegativeInt = Field(default=0, description="Of what is imagined.")

    def build(self, policy: Policy, device: str = "cpu") -> ActionValues:
        """What values the policy's actions.

        Raises:
            ValueError: no such world model, or one of other cameras or another chunk length than the policy's.
        """
        from world_model.env.action_values import WorldModelValues

        return WorldModelValues(policy, self, device)
