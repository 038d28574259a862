"""`vla-rl train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vla_rl.common.run_folder import RunFolder
from vla_rl.recipe.checks import TRAIN, Run
from vla_rl.recipe.runs import TrainRecipe
from vla_rl.training.train import train


def _start(recipe: TrainRecipe, folder: Path, resume: bool, _: Callable[[str], None]) -> list[str]:
    return [f"policy: {train(recipe, folder, resume)}", f"report: {RunFolder(folder).report}"]


RUN = Run(
    "train",
    TRAIN,
    _start,
    datasets=lambda recipe: ("sft.datasets",) if recipe.needs_demonstrations else (),
    free=("train.iterations",),
)
