"""`vla-rl world-model fit`: a world model of a recipe's environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import rich

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import Changed, RunFolder
from vla_rl.config import ConfigError
from vla_rl.recipe.checks import FIT
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import FitRecipe
from vla_rl.training.metrics import MetricLogger
from vla_rl.workflows.collect import collect
from vla_rl.workflows.recipe_parts import env_spec, limit_threads, world_model_section
from world_model.fit.fit import fit
from world_model.fit.stage import updates_kept

DATASETS_OF_A_FIT = tuple(f"world_model.{name}" for name in ("datasets", "success_datasets", "calibrate_on"))
# What only a fit's threshold, chosen last, depends on: free in a fit that is resumed, as is what is collected for it
# (`datasets`: what is there was collected as the recipe says, or is refused); but see `check_threshold`.
CHOOSE_THE_THRESHOLD = tuple(f"world_model.{name}" for name in ("calibrate_on", "max_false_success", "min_failures"))


def fit_world_model(
    recipe: FitRecipe,
    folder: Path,
    datasets: Sequence[Path] = (),
    start_from: str | None = None,
    weights: Sequence[float] | None = None,
    holdout_from: Literal["all", "last"] | None = None,
    calibrate_on: Sequence[Path] = (),
    needs_threshold: bool | None = None,
) -> Path:
    """Fit the recipe's world model, collecting first what it learns from; goes on from what the folder holds.

    Args:
        datasets: to learn from beside `world_model.datasets`. start_from, holdout_from: in place of
            `world_model`'s. weights: how much each of `datasets` counts, relative to 1; None: all 1.
        calibrate_on: datasets for the threshold, in place of held-out episodes of `datasets`.
        needs_threshold: see `world_model.fit.fit`; None: where RL is paid by it.

    Returns:
        the world model's folder, `folder`/world_model.
    """
    limit_threads(recipe)
    section = world_model_section(recipe)
    run = RunFolder(folder)
    if run.world_model.is_dir():
        return run.world_model
    used = {Path(one.path) for name in DATASETS_OF_A_FIT for one in getattr(section, name.partition(".")[2])}
    for config in recipe.datasets:
        if Path(config.dataset) in used and not Path(config.dataset).is_dir():
            collect(recipe, config, rich.print)
    values = section.model_dump()
    more = [{"path": str(p), "weight": w} for p, w in zip(datasets, weights or [1.0] * len(datasets), strict=True)]
    changes: dict[str, Any] = {"datasets": [*values["datasets"], *more]}
    changes |= {"start_from": start_from} if start_from else {}
    changes |= {"holdout_from": holdout_from} if holdout_from else {}
    changes |= {"calibrate_on": [str(path) for path in calibrate_on], "cross_fit": 0} if calibrate_on else {}
    paid = getattr(getattr(recipe.env, "imagination", None), "reward", "success")
    section = type(section).model_validate(values | changes)
    resume = updates_kept(section, folder) if run.metrics.exists() else None
    with MetricLogger(folder, recipe.log, resume_step=resume, run_config=recipe.model_dump(mode="json")) as logger:
        device = resolve_device(recipe.device)
        return fit(
            section,
            env_spec(recipe),
            folder,
            seed=recipe.seed,
            device=device,
            on_metrics=logger.log,
            needs_threshold=paid == "success" if needs_threshold is None else needs_threshold,
            show=recipe.log.console,
            env=recipe.acting_env,
        )


def check_threshold(recipe: FitRecipe, run: RunFolder, changed: Changed) -> None:
    """Check that a resumed fit can choose its threshold as the recipe says now.

    Args:
        recipe: as it is now. changed: as `run_folder.differences` gives it.

    Raises:
        ConfigError: it is finished, and the threshold was chosen otherwise; or `world_model.calibrate_on` began or
            ceased to be given after the first checkpoint, so that the stages have learned from what is to choose it.
    """
    if run.world_model.is_dir() and (late := sorted(changed.keys() & set(CHOOSE_THE_THRESHOLD))):
        there, here = changed[late[0]]
        raise ConfigError(
            f"{late[0]}: there {there!r}, here {here!r}, but {run.world_model} is finished, and its threshold chosen. "
            f"Choose another in another --output, with world_model.start_from={run.world_model} and steps=0 in the "
            "stages"
        )
    there, here = changed.get("world_model.calibrate_on", ((), ()))
    if bool(there) != bool(here) and updates_kept(world_model_section(recipe), run.path):
        kept = "hold some of world_model.datasets out" if here else "learn from all of world_model.datasets"
        raise ConfigError(
            f"world_model.calibrate_on: there {there!r}, here {here!r}, but the stages so far {kept}; keep it "
            f"{'empty' if here else 'given (it may name other episodes)'}, or fit anew in another --output"
        )


def _start(recipe: FitRecipe, folder: Path, _: bool, __: Callable[[str], None]) -> list[str]:
    fitted = fit_world_model(recipe, folder)
    words = ("eval", RunFolder(folder).config, fitted, "--held-out", "EPISODES")
    return [f"world model: {fitted}", next_command("world-model", *words, what="on episodes that it has not seen")]


RUN = Run(
    "world-model fit",
    FIT,
    _start,
    datasets=lambda _: DATASETS_OF_A_FIT,
    free=("datasets", *CHOOSE_THE_THRESHOLD),
    check_changes=check_threshold,
)
