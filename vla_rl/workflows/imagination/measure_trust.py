"""`vla-rl world-model eval | keyframes | styles`: how far a world model can be trusted, and what its data hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import rich

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.recipe.runs import FitRecipe
from vla_rl.workflows.imagination.real_and_imagined import success_as_recorded, success_in_both
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads, world_model_section
from world_model.data.keyframes import mine_keyframes as mine
from world_model.data.style_sheet import write_style_sheet
from world_model.env.config import WorldModelEnvConfig
from world_model.trust.evaluate import measure_trust


def measure_world_model(
    recipe: FitRecipe,
    world_model: Path,
    held_out: Sequence[Path],
    policies: Sequence[str] = (),
    train: Sequence[Path] = (),
    styles: Mapping[str, Path] | None = None,
    folder: Path | None = None,
) -> Path:
    """Measure how far a world model can be trusted; writes trust.json and trust.html into its folder, returns the page.

    Args:
        held_out: datasets of real episodes that it was not fitted on.
        policies: to compare real with imagined success; their real and imagined episodes are run here.
        train: datasets of the same robot for the inverse dynamics, such as those that it was fitted on.
        styles: name -> dataset of episodes with another look (lighting, colors, textures).
        folder: for the report, in place of the world model's.
    """
    limit_threads(recipe)
    section = world_model_section(recipe)
    env = recipe.env if isinstance(recipe.env, WorldModelEnvConfig) else None
    outcomes = [success_in_both(recipe, world_model, policy, section.compare_episodes) for policy in policies]
    chunk_size = build_policy(recipe, env_spec(recipe)).chunk_size
    if env is not None:
        rich.print("the policy acts in imagination, from the held-out episodes' initial states")
    return measure_trust(
        section.measure,
        world_model,
        held_out,
        outcomes,
        acting=env and success_as_recorded(recipe, world_model, held_out),
        train=train,
        styles=styles,
        imagination=env and env.imagination,
        trust=env and env.trust,
        chunk_size=chunk_size,
        device=resolve_device(recipe.device),
        show=rich.print,
        folder=folder,
    )


def mine_keyframes(recipe: FitRecipe, world_model: Path, datasets: Sequence[Path], file: Path) -> Path:
    """Mine datasets of the policy's real episodes for moments to start from; writes and returns the file."""
    limit_threads(recipe)
    section = world_model_section(recipe)
    mine(world_model, datasets, section.keyframes, resolve_device(recipe.device)).save(file)
    return file


def show_styles(recipe: FitRecipe, dataset: Path, file: Path, num_episodes: int, num_styles: int) -> list[str]:
    """Write a picture of a dataset's episodes in the recipe's styles; returns the instructions of those shown."""
    section = world_model_section(recipe)
    options = {"seed": recipe.seed, "num_episodes": num_episodes, "num_styles": num_styles}
    return write_style_sheet(section.style, section.dataset(dataset), env_spec(recipe), file, **options)
