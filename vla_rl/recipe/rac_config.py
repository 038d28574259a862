"""Options of `run: rac`: rounds of episodes with interventions, each followed by behavior cloning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vla_rl.config import Config
from vla_rl.data.config import Frames

RacControl = Literal["new_states", "same_states"]


class ScriptedPersonConfig(Config):
    """The person beside a policy in a simulator: its scripted expert, and when it takes over."""

    alarm: Literal["progress", "clock"] = Field(
        default="progress",
        description="What interrupts the policy. progress: for `patience` steps what the scripted expert would still "
        "have to do has not become less, or the horizon has passed; the simulator must say what remains (the tabletop "
        "does). clock: a share of the horizon has passed.",
    )
    patience: PositiveInt = Field(default=10, description="Control steps without progress that are an alarm.")
    alarm_fraction: PositiveFloat = Field(
        default=0.8,
        le=1,
        description="With alarm=clock: share of the horizon after which an episode that is not solved is interrupted. "
        "Earlier, and more episodes that were going well are interrupted.",
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="Of the policy while it collects; 0 is greedy.")
    operator_steps: PositiveInt = Field(default=48, description="Control steps that an episode has beyond its horizon.")


class RacConfig(ScriptedPersonConfig):
    """Recover and correct (RaC, arXiv 2509.07953) in a simulator, with its scripted expert as the person."""

    rounds: PositiveInt = Field(default=2, description="Times that episodes are collected and the policy is trained.")
    episodes_per_task: PositiveInt = Field(default=12, description="Episodes of each task in a round.")
    start_index: NonNegativeInt = Field(
        default=500_000, description="First initial state of the train split; each round takes the next ones."
    )
    frames: Frames = Field(default="rac", description="Which frames of the rounds to learn from.")
    weight: PositiveFloat = Field(
        default=1.0, description="Share of all rounds together in each batch, relative to sft.datasets' weights."
    )
    controls: tuple[RacControl, ...] = Field(
        default=("new_states", "same_states"),
        description="After the last round, also train controls: cloning of as many additional full demonstrations as "
        "there were interventions of each task, with the same share of each batch and as many updates. new_states: "
        "from initial states of their own, which is what recording without the policy would give; same_states: from "
        "the interventions' initial states, so that they profit from the policy having shown which are hard.",
    )
