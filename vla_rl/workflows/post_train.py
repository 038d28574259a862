"""`vla-rl train`: reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder
from vla_rl.recipe.checks import TRAIN, Run
from vla_rl.recipe.runs import TrainRecipe
from vla_rl.training.train import train
from vla_rl.workflows.recipe_parts import outcome


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
