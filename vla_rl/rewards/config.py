"""Options of a recipe's `reward` section, by which a reward is learned. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from vla_rl.config import Config
from vla_rl.data.config import Datasets, MaybeDatasets
from vla_rl.training.config import OptimConfig, TrainerConfig


class RewardNetworkConfig(Config):
    """The network: convolutions on the first, the last and the present image, modulated by the words."""

    width: int
    dropout: float


class RewardFitConfig(TrainerConfig):
    """How a reward is learned from episodes of which it is recorded how they ended."""

    datasets: Datasets = Field(
        description="Episodes to learn from, successes and failures. Their `weight` does nothing: half of a batch "
        "shows a success, whichever dataset it is from."
    )
    evaluate_on: MaybeDatasets = Field(
        default=(), description="Episodes that `vla-rl reward eval` measures on, of a policy not among those above."
    )
    every: PositiveInt = Field(
        default=8, description="Control steps from one judgement to the next: as many as the policy's chunks have."
    )
    holdout: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="Share of the initial states that nothing is learned from: the threshold is chosen, and "
        "probabilities are fitted, on their episodes.",
    )
    max_false_success: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Bound on the upper 95 % limit of the share of failed episodes that count as successes.",
    )
    min_failures: PositiveInt = Field(default=40, description="Failed episodes that are held out, at least.")
    image_size: PositiveInt = Field(default=64, description="Side that images are resized to, pixels.")
    cameras: tuple[str, ...] = Field(default=(), description="Cameras that it sees; empty: all of the environment's.")
    use_state: bool = Field(default=True, description="It sees the robot's state, too.")
    width: PositiveInt = Field(default=48, description="Channels of the network; a multiple of 16.", multiple_of=16)
    control: Literal["none", "shuffled_outcomes"] = Field(
        default="none", description="Negative control: outcomes shuffled among each task's episodes."
    )
    optim: OptimConfig = OptimConfig(lr=1.5e-3, warmup_steps=50)
    steps: PositiveInt = Field(default=1500, description="Optimizer updates.")
    batch_size: PositiveInt = Field(
        default=64, ge=2, description="Observations per update; half of them show a success, so at least 2."
    )
