"""`vla-rl world-model keyframes`: moments of real episodes from which imagined ones start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.distributed.process_group import resolve_device
from vla_rl.recipe.runs import FitRecipe
from vla_rl.workflows.recipe_parts import limit_threads, world_model_section
from world_model.data.keyframes import mine_keyframes as mine


def mine_keyframes(recipe: FitRecipe, world_model: Path, datasets: Sequence[Path], file: Path) -> Path:
    """Mine datasets of the policy's real episodes for moments to start from; writes and returns the file."""
    limit_threads(recipe)
    section = world_model_section(recipe)
    mine(world_model, datasets, section.keyframes, resolve_device(recipe.device)).save(file)
    return file
