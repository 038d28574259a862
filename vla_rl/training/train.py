"""Post-train a policy by RL: collect, advantages, update, log, validate, save. The loop on one screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vla_rl.config import Config

if TYPE_CHECKING:
    from vla_rl.recipe.runs import TrainRecipe

Control = Literal["none", "shuffled_rewards", "continue_bc"]


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

    @model_validator(mode="after")
    def _best_is_validated(self) -> Self:
        if self.keep == "best" and not self.validate_every:
            raise ValueError("keep 'best' needs validate_every above 0, which finds it; or set keep=last")
        return self


def train(
    recipe: TrainRecipe, folder: Path, resume: bool = False, on_iteration: Callable[[], None] | None = None
) -> Path:
    """Run the recipe in its folder and return the folder of the resulting policy.

    Killed at any moment, `resume=True` continues from the last whole checkpoint; on a CPU with the same numbers.

    Args:
        on_iteration: called after each iteration; an error that it raises ends the run, which can be resumed.

    Raises:
        ValueError: the recipe has no algo section, or its policy never succeeds (nothing to learn from).
        TrainingDivergedError: NaN or infinite losses, gradients or weights; the last good policy is in last_good/.
    """
    from vla_rl.training.run import TrainingRun

    cfg = recipe.train
    with TrainingRun(recipe, folder, resume) as run:
        if run.iteration == 0 and cfg.evaluate == "before_and_after":
            run.evaluate("base")
        while run.goes_on():
            episodes = run.roll_out()
            together = run.earlier.beside(episodes, run.iteration) if run.earlier else episodes
            batch = run.learner.prepare(together)
            metrics = run.learner.update(batch, run.demonstration_loss)
            run.finish_iteration(episodes, metrics)
            if run.is_due(cfg.validate_every):
                run.validate()
            if run.is_due(recipe.gate.every):
                run.check_gain()
            if run.is_due(cfg.save_every) or run.took_real_episodes():
                run.save()
            if on_iteration is not None:
                on_iteration()
        policy = run.keep_policy()
        if cfg.evaluate != "never":
            run.evaluate("final", policy)
        run.report()
    return policy
