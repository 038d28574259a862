"""Options of learning from logged episodes. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vla_rl.config import Config
from vla_rl.training.config import TrainerConfig

Method = Literal["cloning", "filtered", "advantage_weighted", "best_of_n"]


class CriticConfig(TrainerConfig):
    """The critic: how good a chunk is (Q), and how good a place to be (V), on the frozen policy's embeddings."""

    lr: PositiveFloat = Field(default=1e-3, description="Peak learning rate.")
    steps: PositiveInt = Field(default=1500, description="Optimizer updates of each fold's critic.")
    batch_size: PositiveInt = Field(default=256, description="Decisions per update.")
    warmup_steps: int = Field(default=50, ge=0, description="Steps over which the learning rate rises from 0.")
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
    subset: PositiveInt = Field(default=2, description="Networks drawn for each target, the smallest of which counts.")
    hidden: PositiveInt = Field(default=256, description="Width of the networks' two hidden layers.")
    target_decay: float = Field(default=0.99, ge=0, lt=1, description="Of the slow copy of V that targets come from.")
    folds: PositiveInt = Field(
        default=3,
        description="An episode is judged by a critic that has not seen its initial state: episodes are cut into so "
        "many parts; at least 2.",
        ge=2,
    )


class OfflineConfig(Config):
    """How a policy is improved from the episodes in `sft.datasets`; `sft` has the cloning's own options."""

    method: Method = Field(
        default="best_of_n",
        description="What is cloned. cloning: everything; filtered: episodes that succeeded; advantage_weighted: "
        "everything, each decision by how much better than expected it turned out; best_of_n: at each logged "
        "observation, the best of some of the policy's own chunks and the logged one, as the critic says (Digi-Q).",
    )
    advantage: Literal["outcome", "critic"] = Field(
        default="outcome",
        description="advantage_weighted: what a decision is worth: its episode's discounted outcome, or its Q; "
        "both less V.",
    )
    temperature: PositiveFloat = Field(
        default=0.2, description="advantage_weighted: a decision counts exp(advantage / temperature) times."
    )
    largest_weight: PositiveFloat = Field(
        default=20.0,
        description="advantage_weighted: a decision counts at most so many times as one that went as expected.",
    )
    candidates: PositiveInt = Field(default=8, description="best_of_n: chunks drawn from the policy.")
    sampling_temperature: PositiveFloat = Field(default=1.0, description="best_of_n: of those draws.")
    decisions: PositiveInt = Field(
        default=5000, description="best_of_n: logged observations to draw for, chosen at random."
    )
    control: Literal["none", "shuffled_outcomes"] = Field(
        default="none",
        description="Negative control: outcomes dealt anew among each task's episodes before anything is learned.",
    )
    evaluate: Literal["before_and_after", "after", "never"] = Field(
        default="before_and_after", description="When to run the `eval` section's evaluation."
    )
    critic: CriticConfig = Field(default_factory=CriticConfig)
