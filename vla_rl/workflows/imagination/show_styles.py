"""`vla-rl world-model styles`: recorded episodes in the styles that a world model is fitted on."""

from __future__ import annotations

from pathlib import Path

from vla_rl.recipe.runs import FitRecipe
from vla_rl.workflows.recipe_parts import env_spec, world_model_section
from world_model.data.style_sheet import write_style_sheet


def show_styles(recipe: FitRecipe, dataset: Path, file: Path, num_episodes: int, num_styles: int) -> list[str]:
    """Write a picture of a dataset's episodes in the recipe's styles; returns the instructions of those shown."""
    section = world_model_section(recipe)
    options = {"seed": recipe.seed, "num_episodes": num_episodes, "num_styles": num_styles}
    return write_style_sheet(section.style, section.dataset(dataset), env_spec(recipe), file, **options)
