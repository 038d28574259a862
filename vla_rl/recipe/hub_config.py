"""Options of `vla-rl hub measure`: several simulated robots and one scripted person between them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vla_rl.config import Config
from vla_rl.types import Split


class HubProcesses(Config):
    """How `--processes` runs the real programs, in real time."""

    speed: PositiveFloat = Field(default=0.5, le=20, description="How many times faster than real time the robots run.")
    hands: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="How fast the person drives, as a share of the expert's own speed (the console's teleop.speed). "
        "The hands are two to three control steps behind what they see; from about 0.5 on they overshoot.",
    )
    piece: PositiveInt = Field(default=25, description="Episodes after which the programs are started anew.")
    slack: PositiveFloat = Field(
        default=0.5,
        description="Seconds that an observation, a command or the person's word may be old: a busy machine needs more "
        "than a robot's computer.",
    )
    waits: PositiveFloat = Field(
        default=3.0,
        description="Times its horizon that a policy may drive without asking for help, until the person comes and "
        "ends the episode.",
    )


class HubConfig(Config):
    """How many robots, which episodes, what asks for help, and how long the person needs."""

    robots: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4), min_length=1, description="Numbers of robots to measure, each with one person."
    )
    episodes_per_task: PositiveInt = Field(default=40, description="Episodes of each task, the same for each number.")
    split: Split = Field(default="eval", description="Split of the initial states.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split that is used.")
    alarm: Literal["detector", "progress"] = Field(
        default="detector",
        description="What asks for help. detector: the failure detector `hub.detector`, fitted first by the recipe's "
        "failure section. progress: for `patience` steps what the scripted expert would still have to do has not "
        "become less, which only a simulator can tell.",
    )
    detector: str = Field(
        default="safe_lstm", description="Name of the detector, one of failure.detectors, or a detector's folder."
    )
    patience: PositiveInt = Field(
        default=20, description="Control steps without progress after which the person gives up (and an alarm comes)."
    )
    operator_steps: PositiveInt = Field(
        default=96, description="Control steps that the person drives in an episode, at most."
    )
    hand_over: NonNegativeFloat = Field(
        default=3.0, description="Seconds from when the person turns to a robot until it moves."
    )
    head_start: NonNegativeFloat = Field(
        default=30.0,
        description="Seconds that a robot whose score is twice its threshold counts as if it had waited longer.",
    )
    processes: HubProcesses = Field(default=HubProcesses(), description="For `vla-rl hub measure --processes`.")
    temperature: NonNegativeFloat = Field(default=0.0, description="Of the policy's sampling; 0 is greedy.")
