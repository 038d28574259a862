"""Options of training: the optimizer's, a trainer's, behavior cloning's and an RL run's. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vla_rl.config import Config
from vla_rl.data.config import AugmentConfig, Datasets

Beta = Annotated[float, Field(ge=0, lt=1)]
Control = Literal["none", "shuffled_rewards", "continue_bc"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]


class OptimConfig(Config):
    """The optimizer and its warm-up."""

    name: OptimizerName = Field(
        default="adamw",
        description="adamw_8bit: AdamW with its moments in 8 bits (needs torchao); muon: Muon for hidden matrices "
        "(scaled to AdamW's step size), AdamW for embeddings, heads, vectors and convolutions.",
    )
    lr: PositiveFloat = Field(default=3e-4, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's running-average factors.")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="Decoupled weight decay.")
    warmup_steps: NonNegativeInt = Field(
        default=0, description="Optimizer steps over which the learning rate rises from 0; Adam's first are big."
    )
    grad_clip: PositiveFloat | None = Field(
        default=1.0, description="Largest gradient norm, to which larger ones are scaled; null: no clipping."
    )


class OptimizedConfig(Config):
    """What is trained by an optimizer, whose options are the section `optim`.

    Attributes:
        max_bad_steps: with NaN or infinite loss or gradients in a row, each skipped, after which the training stops.
    """

    max_bad_steps: ClassVar[int] = 10

    optim: OptimConfig = OptimConfig()

    def with_optim(self, **changes: object) -> Self:
        """A copy with some options of the optimizer changed."""
        return self.model_copy(update={"optim": self.optim.model_copy(update=changes)})


class TrainerConfig(OptimizedConfig):
    """A training of a known length: what `Trainer` takes."""

    steps: PositiveInt = Field(default=1000, description="Optimizer updates.")
    batch_size: PositiveInt = Field(default=64, description="Examples per update.")

    @property
    def last_lr_share(self) -> float:
        """Share of the peak learning rate that a cosine decay after the warm-up ends at; 1: no decay."""
        return 0.0


class AveragedConfig(TrainerConfig):
    """A training whose result may be an average of its weights."""

    ema_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, which is the result; 0: the last weights.",
    )


class SFTConfig(AveragedConfig):
    """Behavior cloning of a policy on demonstrations."""

    optim: OptimConfig = Field(default=OptimConfig(warmup_steps=100), description="Warms up in `steps` at most.")
    datasets: Datasets = Field(
        description="LeRobotDataset v3 folders: a path, or a list of paths or of {path, weight, ...}."
    )
    image_size: PositiveInt | None = Field(
        default=None, description="Resize images to this side; empty keeps the dataset's."
    )
    action_scale: Literal["quantiles", "environment"] = Field(
        default="quantiles",
        description="Which actions the outermost bins stand for, in a fresh policy: the data's 1 % and 99 % quantiles "
        "(OpenVLA), or -1 and 1 of the environment, which keeps dimensions that hardly move from filling all bins.",
    )
    steps: PositiveInt = Field(default=2000, description="Optimizer updates.")
    grad_accumulation: PositiveInt = Field(default=1, description="Parts into which a batch is cut to save memory.")
    final_lr_fraction: float = Field(
        default=0.1, ge=0, le=1, description="Share of lr that a cosine decay after the warm-up ends at; 1: no decay."
    )
    precision: Literal["policy", "bf16"] = Field(
        default="policy", description="accelerate's mixed precision; policy: none, the policy's own precision holds."
    )
    augment: AugmentConfig = Field(default_factory=AugmentConfig, description="Of the training images.")
    validation_fraction: float = Field(default=0.0, ge=0, lt=1, description="Share of episodes held out for a loss.")
    log_every: PositiveInt = Field(default=20, description="Steps between logged (averaged) metrics.")
    save_every: PositiveInt = Field(default=500, description="Steps between checkpoints.")
    keep_checkpoints: PositiveInt = Field(default=2, description="Checkpoints kept.")

    @property
    def last_lr_share(self) -> float:
        return self.final_lr_fraction


class TrainConfig(Config):
    """The RL run: how much, how often to look, which control."""

    iterations: PositiveInt = Field(default=20, description="Rollout-and-update rounds.")
    groups: PositiveInt = Field(default=32, description="Initial states per iteration.")
    group_size: PositiveInt = Field(default=8, description="Episodes from each initial state.")
    temperature: float = Field(default=1.0, gt=0, description="Of the rollouts' action sampling.")
    resample_budget: NonNegativeInt = Field(
        default=0,
        description="Dynamic sampling: up to this many more groups replace those whose episodes are all paid the same: "
        "with rewards of 0 and 1, all-success and all-failure ones.",
    )
    reuse: NonNegativeInt = Field(
        default=0,
        description="Earlier rollouts that each update learns from once more, by importance weights; 0: none.",
    )
    control: Control = Field(
        default="none", description="Negative control: permuted advantages, or behavior cloning instead."
    )
    allow_no_success: bool = Field(
        default=False, description="Start RL although the policy never succeeds in its rollouts."
    )
    validate_every: NonNegativeInt = Field(default=0, description="Iterations between validations; 0 for none.")
    validation_episodes: PositiveInt = Field(
        default=20, description="Validation episodes per task, sampled and greedy."
    )
    keep: Literal["best", "last"] = Field(
        default="last", description="The policy evaluated and kept: best by validation, or last."
    )
    save_every: PositiveInt = Field(
        default=5,
        description="Iterations between checkpoints; in a world model one also follows each validation and check of "
        "the gate.",
    )
    keep_checkpoints: PositiveInt = Field(default=2, description="Checkpoints kept.")
    evaluate: Literal["before_and_after", "after", "never"] = Field(
        default="before_and_after", description="When to run the `eval` section's evaluation."
    )
