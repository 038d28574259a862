"""Options of `vla-rl failure fit` and `eval`: a recipe's `failure` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from real_robot.failure.conformal import BandKind
from vla_rl.config import Config
from vla_rl.data.config import MaybeDatasets
from vla_rl.interfaces import FailureDetectionConfig
from vla_rl.types import Split

Kind = Literal["float_ot", "rnd", "logpzo", "safe_mlp", "safe_lstm"]


class EpisodesConfig(Config):
    """Where episodes of the policy come from: recorded ones, or new ones run in the recipe's environment."""

    datasets: MaybeDatasets = Field(default=(), description="Recorded episodes; empty runs new ones, as below.")
    same_policy: bool = Field(default=True, description="Refuse recorded episodes in which another checkpoint acted.")
    episodes_per_task: PositiveInt = Field(default=200, description="How many new episodes of each task are run.")
    split: Split = Field(default="train", description="Split of the initial states that new episodes begin in.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split that is used.")
    temperature: NonNegativeFloat = Field(
        default=1.0, description="Temperature of the policy's sampling, as it will be deployed."
    )


class FailureConfig(FailureDetectionConfig):
    """Scores on embeddings of the policy, each with a conformal band."""

    kind: Literal["conformal"] = "conformal"
    detectors: tuple[Kind, ...] = Field(
        default=("float_ot", "rnd", "logpzo", "safe_mlp", "safe_lstm"),
        min_length=1,
        description="Which detectors are fitted.",
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="Largest probability of a false alarm in a whole successful episode."
    )
    band: BandKind = Field(
        default="functional",
        description="How the threshold of the scores that learn from successes alone varies over time (see "
        "real_robot/failure/conformal.py); SAFE's is constant, since a probability has a scale of its own.",
    )
    every: NonNegativeInt = Field(
        default=0, description="Control steps from one embedding of a recorded episode to the next; 0: the chunk size."
    )
    fit_on: EpisodesConfig = EpisodesConfig(episodes_per_task=400)
    calibrate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, start_index=10_000)
    evaluate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, split="eval")
    min_failures: PositiveInt = Field(default=20, description="Failed episodes that the supervised scores ask for.")
