"""Options of planning at test time (see world_model/env/planning.py). Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vla_rl.interfaces import PlanningConfig, PlanningPolicy, Policy


class PlanConfig(PlanningConfig):
    """Of several action chunks that the policy draws, execute the one whose imagined future looks most successful."""

    kind: Literal["best_of_n"] = "best_of_n"
    world_model: str | Path = Field(description="A world model's folder, or pretrained:NAME.")
    candidates: PositiveInt = Field(default=8, description="N, action chunks drawn at each decision.")
    chunks: PositiveInt = Field(
        default=2, description="Chunks imagined of each: the candidate, then what the policy does next, greedily."
    )
    temperature: PositiveFloat = Field(default=1.0, description="At which the candidates are drawn.")
    choose: Literal["best", "random"] = Field(
        default="best", description="random: any of the candidates, the control; nothing is imagined."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(default="auto", description="Of the world model's networks.")
    seed: NonNegativeInt = Field(default=0, description="Of what is imagined, and of random choices.")

    def build(self, policy: Policy, device: str = "cpu") -> PlanningPolicy:
        """The policy that plans.

        Raises:
            ValueError: no such world model, or one of other cameras or another chunk length than the policy's.
        """
        from world_model.env.planning import Planner

        return cast(PlanningPolicy, Planner(policy, self, device))  # What it lacks, it takes from the policy.

    def protocol(self) -> str:
        return f"{self.choose} of {self.candidates} chunks imagined in a world model"
