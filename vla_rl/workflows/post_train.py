"""`vla-rl train`: reinforcement learning."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from vla_rl.common.run_folder import RunFolder
from vla_rl.recipe.checks import TRAIN, Run
from vla_rl.recipe.runs import TrainRecipe
from vla_rl.training.train import train
from vla_rl.workflows.recipe_parts import outcome


def _start(recipe: TrainRecipe, folder: Path, resume: bool, _: Callable[[str], None]) -> list[str]:
    train(recipe, folder, resume)
    config = shlex.quote(str(RunFolder(folder).config))
    return [*outcome(folder), f"next, was it RL that did it: vla-rl sweep {config} --controls 3"]


RUN = Run(
    "train",
    TRAIN,
    _start,
    datasets=lambda recipe: ("sft.datasets",) if recipe.needs_demonstrations else (),
    free=("train.iterations",),
)
