"""Options of off-policy learning: the critics, and learning from a replay buffer. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vla_rl.config import Config
from vla_rl.training.config import OptimConfig, OptimizedConfig, TrainerConfig

ChooseBy = Literal["lead", "value"]
TARGET_DECAY = 0.99  # Of the slow copies that targets come from.
PRIOR_SHARE = 0.5  # Of each batch, what the prior has once there are fresh episodes (RLPD).
ENTROPY_WEIGHT = 1e-3  # Of an actor's entropy, in nats of all that it chooses, beside Q in [0, 1].


class CriticNetworkConfig(OptimizedConfig):
    """The critic: how good a chunk is (Q), and how good a state is (V), on the frozen policy's embeddings."""

    optim: OptimConfig = OptimConfig(lr=1e-3)
    batch_size: PositiveInt = Field(default=256, description="Decisions per update.")
    targets: Literal["td", "monte_carlo"] = Field(
        default="td",
        description="What Q learns. td: the discounted value of the next decision, or the outcome at its end (a "
        "chunk is one action, CO-RFT); monte_carlo: the episode's discounted outcome.",
    )
    discount: float = Field(default=0.99, gt=0, le=1, description="Per control step: a later success is worth less.")
    expectile: float = Field(
        default=0.5,
        ge=0.5,
        lt=1,
        description="What V is of the Q of logged chunks: .5 their mean; toward 1 that of the best ones (IQL).",
    )
    members: PositiveInt = Field(default=4, description="Networks of Q; their outputs' spread shows what is not known.")
    hidden: PositiveInt = Field(
        default=256,
        description="Width of the two hidden layers of these networks, and of what edits or steers by them.",
    )


class CriticConfig(CriticNetworkConfig, TrainerConfig):
    """The critic of `run: offline`: cross-fitted, each fold's for a known number of updates."""

    optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=50)
    steps: PositiveInt = Field(default=1500, description="Optimizer updates of each fold's critic.")


class OnlineCriticConfig(CriticNetworkConfig):
    """The critic of `run: online`: fitted on one replay buffer by updates that each round counts."""

    targets: Literal["td", "best_of_n", "actor", "monte_carlo"] = Field(
        default="td",
        description="What Q learns. td: the discounted V of the next decision, or the outcome at the end; best_of_n: "
        "there the best of the policy's own chunks, by the smallest of some Q (EXPO); actor: of method=noise, what "
        "the actor chooses there, by the smallest of some Q of noises (SAC); monte_carlo: the episode's discounted "
        "outcome.",
    )
    expectile: float = Field(
        default=0.5,
        ge=0.5,
        lt=1,
        description="targets=td: what V is of the Q of executed chunks: .5 their mean; toward 1 the best ones' (IQL).",
    )


class EditsConfig(OptimizedConfig):
    """The edit policy: changes a candidate chunk within bounds so that Q rises (EXPO, arXiv 2507.07986)."""

    scale: PositiveFloat = Field(
        default=0.3,
        description="Largest change of each number of a chunk, in that number's standard deviations; one that never "
        "varies in the data is not changed.",
    )


class NoiseConfig(OptimizedConfig):
    """The actor that chooses the noise which a frozen flow policy's chunk starts from (DSRL, arXiv 2506.15799)."""

    scale: PositiveFloat = Field(
        default=2.0, description="Bound of each number that it chooses; the policy's own noise has a spread of 1."
    )


class ReplayLearningConfig(Config):
    """How a frozen policy is improved from replayed decisions, whoever made them."""

    method: Literal["best_of_n", "edits", "noise"] = Field(
        default="best_of_n",
        description="What acts. best_of_n: of the policy's chunks, the one that the critic prefers (IDQL); edits: a "
        "small policy's changes of them stand for choice too (EXPO); noise: of a flow policy, the chunk of a noise "
        "that an actor chooses (DSRL).",
    )
    choose_by: ChooseBy = Field(
        default="lead",
        description="Of best_of_n and edits: which chunk the critic prefers. lead: the greedy one, unless all networks "
        "of the ensemble prefer another one, then that of the largest lead; value: that of the largest Q, the smallest "
        "of the ensemble's.",
    )
    prior: Literal["datasets", "none"] = Field(
        default="datasets",
        description="What half of each batch is, once there are fresh episodes. datasets: logged ones (RLPD); none: no "
        "logged ones, which only warm the critic up (WSRL). In `hil` a person's decisions are of it, either way.",
    )
    warm_updates: NonNegativeInt = Field(
        default=1500,
        description="Updates on the logged episodes alone before the first round; 0: no dataset is read for them.",
    )
    candidates: PositiveInt = Field(
        default=8,
        description="The policy's chunks at each observation: the greedy one, the others drawn; with method=noise "
        "they are not chosen among, but teach which noise makes which chunk.",
    )
    control: Literal["none", "shuffled_outcomes"] = Field(
        default="none",
        description="Negative control: outcomes shuffled among the episodes of each task, of the logged ones and of "
        "each round, before anything is learned.",
    )
    evaluate: Literal["before_and_after", "after", "never"] = Field(
        default="before_and_after", description="When to run the `eval` section's evaluation."
    )
    critic: OnlineCriticConfig = Field(default_factory=OnlineCriticConfig)
    edits: EditsConfig = Field(default_factory=EditsConfig, description="Of method edits.")

    @property
    def reads_datasets(self) -> bool:
        """Whether logged episodes are learned from."""
        return self.prior == "datasets" or self.warm_updates > 0

    @model_validator(mode="after")
    def _something_to_choose(self) -> ReplayLearningConfig:
        if self.method == "best_of_n" and self.candidates < 2:
            raise ValueError("candidates: got 1, and method best_of_n chooses among several; give at least 2")
        if self.method == "noise" and self.candidates < 2:
            raise ValueError(
                "candidates: got 1, and method noise learns from chunks of known noises, the first of which is 0; give "
                "at least 2"
            )
        if self.method == "noise" and self.choose_by != "lead":
            raise ValueError(f"choose_by: got {self.choose_by!r}, and method noise considers one chunk; leave it out")
        if self.critic.targets == "actor" and self.method != "noise":
            raise ValueError(
                f"critic.targets: got 'actor', which is of method noise, and method is {self.method!r}; set td"
            )
        return self


class OnlineConfig(ReplayLearningConfig):
    """How a frozen policy is improved from its own episodes as they come, and those logged before."""

    noise: NoiseConfig = Field(default_factory=NoiseConfig, description="Of method noise.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the train split.")
    rounds: PositiveInt = Field(default=8, description="Rounds of collecting episodes and updating.")
    episodes_per_round: PositiveInt = Field(default=60, description="Episodes of a round, of all tasks in turn.")
    updates_per_round: PositiveInt = Field(default=300, description="Updates after each round's episodes.")


class ConstantRateConfig(TrainerConfig):
    """Updates whose number nobody knows beforehand: after the warm-up the learning rate stays."""

    @property
    def last_lr_share(self) -> float:
        return 1.0
