"""Datasets on the Hub by their commit, so that a run's recipe says for good what it learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vla_rl.common.hub import parse_name

if TYPE_CHECKING:
    from vla_rl.data.config import DatasetConfig
    from vla_rl.recipe.recipe import Recipe
    from vla_rl.recipe.runs import TrainRecipe

DATASETS_OF_A_FIT = tuple(f"world_model.{name}" for name in ("datasets", "success_datasets", "calibrate_on"))


def pinned[R: Recipe](recipe: R, show: Callable[[str], None], *fields: str) -> R:
    """Return the recipe with the commit of each dataset that the Hub gives.

    Args:
        show: told where each dataset of such a name comes from: the Hub, or a folder here that has its name.
        fields: `SECTION.FIELD`s of datasets.

    Raises:
        DatasetError: no such dataset or revision, or the Hub cannot be reached.
    """
    changes = {}
    for field in fields:
        section, _, name = field.partition(".")
        options = changes.get(section) or getattr(recipe, section, None)
        datasets = getattr(options, name, ())
        found = tuple(_pinned(one, show, field) for one in datasets)
        if options is not None and found != tuple(datasets):
            changes[section] = options.model_copy(update={name: found})
    return recipe.model_copy(update=changes) if changes else recipe


def pinned_demonstrations[R: TrainRecipe](recipe: R, show: Callable[[str], None]) -> R:
    """Return `pinned` of the demonstrations that RL learns from beside its own episodes, where it does."""
    return pinned(recipe, show, "sft.datasets") if recipe.needs_demonstrations else recipe


def _pinned(dataset: DatasetConfig, show: Callable[[str], None], field: str) -> DatasetConfig:
    name = parse_name(dataset.path)
    if name is None or name.may_be_local:
        return dataset
    from vla_rl.data.hub import on_hub

    remote = on_hub(dataset.path)
    if remote is None:
        show(f"{field}: {dataset.path} is the folder here of that name; the hub is not asked")
        return dataset
    show(f"{field}: {remote.name} from the hub")
    return dataset.model_copy(update={"path": str(remote.name)})
