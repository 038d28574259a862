"""Post-train a policy by RL: collect, advantages, update, log, validate, save. The loop on one screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.verdict import outcome
from vla_rl.recipe.recipe import TRAIN, Run, TrainRecipe
from vla_rl.training.run import TrainingRun


def train(
    recipe: TrainRecipe, folder: Path, resume: bool = False, on_iteration: Callable[[], None] | None = None
) -> Path:
    """Run the recipe in its folder and return the folder of the resulting policy.

    Killed at any moment, `resume=True` continues from the last whole checkpoint; on a CPU with the same numbers.
    `on_iteration` is called after each iteration; an error that it raises ends the run, which can be resumed.

    Raises:
        NoSuccessError: the policy never succeeds, so there is nothing to learn from.
        TrainingDivergedError: NaN or infinite losses, gradients or weights; the last good policy is in last_good/.
    """
    cfg = recipe.train
    with TrainingRun(recipe, folder, resume) as run:
        if run.iteration == 0 and cfg.evaluate == "before_and_after":
            run.evaluate("base")
        while run.goes_on():
            episodes = run.roll_out()
            together = run.earlier.beside(episodes, run.iteration) if run.earlier else episodes
            batch = run.learner.prepare(together)
            metrics = run.learner.update(batch, run.demonstrations and run.demonstrations.loss)
            run.finish_iteration(episodes, metrics)
            if run.is_due(cfg.validate_every):
                run.validate()
            if run.is_due(recipe.gate.every):
                run.check_gain(episodes)
            if run.is_due(cfg.save_every) or run.took_real_episodes():
                run.save()
            if on_iteration is not None:
                on_iteration()
        policy = run.keep_policy()
        if cfg.evaluate != "never":
            run.evaluate("final", policy)
        run.report()
    return policy


def _start(recipe: TrainRecipe, folder: Path, resume: bool, _: Callable[[str], None]) -> list[str]:
    train(recipe, folder, resume)
    controls = next_command("sweep", RunFolder(folder).config, "--controls", 3, what="was it RL that did it")
    return [*outcome(folder), controls]


RUN = Run(
    "train",
    TRAIN,
    _start,
    datasets=lambda recipe: ("sft.datasets",) if recipe.needs_demonstrations else (),
    free=("train.iterations",),
)
