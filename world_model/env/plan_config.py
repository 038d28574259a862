"""Options of planning at test time (see world_model/env/planning.py). Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vla_rl.config import ConfigError
from vla_rl.interfaces import PlanningConfig, PlanningPolicy, Policy


class PlanConfig(PlanningConfig):
    """Of several action chunks that the policy draws, execute the one whose imagined future looks most successful."""

    kind: Literal["best_of_n"] = "best_of_n"
    world_model: str | Path = Field(description="A world model's folder, or pretrained:NAME.")
    candidates: PositiveInt = Field(default=8, description="N, action chunks drawn at each decision.")
    chunks: PositiveInt = Field(
        default=2, description="Chunks imagined of each: the candidate, then what the policy does next, greedily."
    )
    judge: Literal["success", "value"] = Field(
        default="success",
        description="success: the highest logit of success in the imagined frames. value: that of success by the end, "
        "at the last of them, for tasks that are much longer than what is imagined; the world model needs a value.",
    )
    temperature: PositiveFloat = Field(default=1.0, description="At which the candidates are drawn.")
    bonus: NonNegativeFloat = Field(
        default=0.0,
        description="Added to a candidate's score, a logit, for each time that its imagined futures disagree as much "
        "as the candidates' do on average: by other noise, or by the members of a posterior where there is one. Real "
        "episodes then go where the world model is unsure (COPlanner); for collecting, collect.plan. 0: none.",
    )
    choose: Literal["best", "random"] = Field(
        default="best", description="random: any of the candidates, the control; nothing is imagined."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(default="auto", description="Of the world model's networks.")
    seed: NonNegativeInt = Field(default=0, description="Of what is imagined, and of random choices.")

    @model_validator(mode="after")
    def _bonus_is_for_the_best(self) -> PlanConfig:
        if self.bonus and self.choose == "random":
            raise ConfigError(
                f"plan.bonus: got {self.bonus:g} with choose 'random', which asks no score; set bonus to 0"
            )
        return self

    def build(self, policy: Policy, device: str = "cpu") -> PlanningPolicy:
        """The policy that plans.

        Raises:
            ValueError: no such world model, or one of other cameras or another chunk length than the policy's.
            ConfigError: `judge` is the value, and the world model has none.
        """
        from world_model.env.planning import Planner

        return cast(PlanningPolicy, Planner(policy, self, device))  # What it lacks, it takes from the policy.

    def protocol(self) -> str:
        bonus = f", with a bonus of {self.bonus:g} for disagreement" if self.bonus else ""
        judge = ", by its value" if self.judge == "value" and self.choose == "best" else ""
        return f"{self.choose} of {self.candidates} chunks imagined in a world model{judge}{bonus}"
