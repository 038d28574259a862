"""`vla-rl reward fit` and `eval`: episodes, fit, and evaluation of a learned reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.next_command import next_command
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.hub import check_datasets
from vla_rl.recipe.checks import REWARD
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import RewardRecipe
from vla_rl.rewards.fit import data_needs, fit_reward
from vla_rl.rewards.frames import RewardFrames, open_frames
from vla_rl.rewards.measure import PAGE_FILE, RewardResult, measure, write_page
from vla_rl.rewards.model import LearnedReward
from vla_rl.workflows.collect import collect
from vla_rl.workflows.recipe_parts import env_spec, limit_threads

MODEL = "reward"  # In the run's folder.


def fit(recipe: RewardRecipe, folder: Path, show: Callable[[str], None]) -> Path:
    """Fit the recipe's reward on its datasets, which are collected first where missing; returns the reward's folder.

    Begins anew where it was stopped, but for the datasets.

    Raises:
        ConfigError: the recipe has no reward section.
        DatasetError: a dataset is not there, or records no outcomes.
        CalibrationError: the reward cannot tell successes from failures well enough.
    """
    section = recipe.reward
    limit_threads(recipe)
    frames = _frames(recipe, section.datasets, "reward.datasets", section.every, show)
    model = fit_reward(section, frames, recipe.seed, resolve_device(recipe.device), show)
    facts = model.save(folder / MODEL, frames.starts.tolist())
    found = facts.figures
    show(
        f"held out: AUC {found['auc'].value:.3f}; of {facts.num_failures} failures "
        f"{100 * found['false_success'].value:.1f} % count (at most {100 * found['false_success'].high:.1f} %), "
        f"of the successes {100 * found['recall'].value:.1f} %"
    )
    return folder / MODEL


def evaluate(recipe: RewardRecipe, folder: Path, show: Callable[[str], None]) -> tuple[RewardResult, Path]:
    """Measure the reward of a run's folder on `reward.evaluate_on`; writes reward.json and reward.html there.

    Returns:
        What was found, and the page's path.

    Raises:
        ConfigError: no episodes to measure on are named.
        ValueError: the reward was fitted on some of their initial states, or all ended alike.
    """
    section = recipe.reward
    if not section.evaluate_on:
        raise ConfigError("reward.evaluate_on: names no dataset; give one of a policy that the reward has not seen")
    limit_threads(recipe)
    model = LearnedReward.load(folder / MODEL)
    frames = _frames(recipe, section.evaluate_on, "reward.evaluate_on", model.facts.every, show)
    result, judged = measure(folder / MODEL, model, frames)
    result.save(folder)
    return result, write_page(result, model, frames, judged, folder / PAGE_FILE)


def _frames(
    recipe: RewardRecipe, datasets: Sequence[DatasetConfig], field: str, every: int, show: Callable[[str], None]
) -> RewardFrames:
    """The episodes of datasets, judged every `every` control steps; the recipe's own are collected where not there."""
    wanted = {config.path for config in datasets}
    for config in recipe.datasets:
        if str(config.dataset) in wanted and not Path(config.dataset).is_dir():
            collect(recipe, config, show)
    check_datasets(wanted, field)
    return open_frames(datasets, data_needs(recipe.reward, env_spec(recipe)), every)


def _start(recipe: RewardRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
    return [f"reward: {fit(recipe, folder, show)}", next_command("reward", "eval", folder)]


RUN = Run("reward fit", REWARD, _start, datasets=lambda _: ("reward.datasets", "reward.evaluate_on"))
