"""Options of `vla-rl failure fit` and `eval`: a recipe's `failure` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from real_robot.failure.conformal import BandKind
from vla_rl.config import Config, ConfigError
from vla_rl.data.config import MaybeDatasets
from vla_rl.interfaces import FailureDetectionConfig
from vla_rl.training.config import OptimConfig, TrainerConfig
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


class ScoreConfig(Config):
    """What every score's options have."""

    band: BandKind = Field(
        default="functional", description="How the threshold varies over time; see real_robot/failure/conformal.py."
    )


class NetworkConfig(TrainerConfig):
    """A small network and its training."""

    width: PositiveInt = Field(default=256, description="Of the hidden layers.")
    layers: PositiveInt = Field(default=2, description="Hidden layers.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="While training.")
    steps: PositiveInt = Field(default=1500, description="Updates.")
    batch_size: PositiveInt = Field(default=128, description="Embeddings, or for SAFE episodes, in an update.")
    optim: OptimConfig = OptimConfig(lr=1e-3, betas=(0.9, 0.999), grad_clip=None)


class FloatConfig(ScoreConfig):
    """FLOAT: partial optimal transport to demonstrations."""

    regularization: PositiveFloat = Field(default=0.1, description="Entropy of the transport plan.")
    num_candidates: PositiveInt = Field(default=50, description="K, demonstrations kept after the first embedding.")


class RNDConfig(ScoreConfig):
    """RND: error of predicting a random network."""

    outputs: PositiveInt = Field(default=64, description="Size of the random network's output, which is predicted.")
    network: NetworkConfig = NetworkConfig()


class LogpZOConfig(ScoreConfig):
    """logpZO: a flow from embeddings to noise."""

    network: NetworkConfig = NetworkConfig()


class SAFEConfig(ScoreConfig):
    """SAFE: supervised, from successes and failures."""

    band: BandKind = Field(
        default="constant",
        description="How the threshold varies over time; a probability has a scale of its own, so it is constant.",
    )
    network: NetworkConfig = NetworkConfig(
        width=128, layers=1, dropout=0.3, steps=1000, batch_size=64, optim=OptimConfig(weight_decay=0.1)
    )


class FailureConfig(FailureDetectionConfig):
    """Scores on embeddings of the policy, each with a functional conformal band."""

    kind: Literal["conformal"] = "conformal"
    detectors: tuple[Kind, ...] = Field(
        default=("float_ot", "rnd", "logpzo", "safe_mlp", "safe_lstm"),
        min_length=1,
        description="Which detectors are fitted.",
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="Largest probability of a false alarm in a whole successful episode."
    )
    every: NonNegativeInt = Field(
        default=0, description="Control steps from one embedding of a recorded episode to the next; 0: the chunk size."
    )
    fit_on: EpisodesConfig = EpisodesConfig(episodes_per_task=400)
    calibrate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, start_index=10_000)
    evaluate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, split="eval")
    float_ot: FloatConfig = FloatConfig()
    rnd: RNDConfig = RNDConfig()
    logpzo: LogpZOConfig = LogpZOConfig()
    safe_mlp: SAFEConfig = SAFEConfig()
    safe_lstm: SAFEConfig = SAFEConfig()
    min_failures: PositiveInt = Field(default=20, description="Failed episodes that the supervised scores ask for.")

    def of(self, kind: str) -> ScoreConfig:
        """Return the options of one score."""
        options = getattr(self, kind, None)
        if not isinstance(options, ScoreConfig):
            raise ConfigError(f"failure.detectors: unknown {kind!r}")
        return options
