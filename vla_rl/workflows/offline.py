"""`run: offline`: a policy improved from logged episodes alone, and what that came to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.algorithms.offpolicy.advantage_conditioned import condition, unconditioned
from vla_rl.algorithms.offpolicy.advantage_conditioned_config import AdvantageConditionedConfig
from vla_rl.algorithms.offpolicy.advantage_words import check_words_are_read
from vla_rl.algorithms.offpolicy.config import OfflineConfig
from vla_rl.algorithms.offpolicy.critic import fit_critic
from vla_rl.algorithms.offpolicy.examples import Examples, WeightedDataset, advantage_weights, best_of_n, worded
from vla_rl.algorithms.offpolicy.features import FeatureCache
from vla_rl.algorithms.offpolicy.preferences import (
    PreferenceDataset,
    Preferences,
    PreferenceTrainer,
    decisions_at_once,
    pair_up,
    read_pairs,
    reference_log_probs,
)
from vla_rl.algorithms.offpolicy.transitions import logged_transitions
from vla_rl.common.run_folder import RunFolder
from vla_rl.data.dataset import BCDataset
from vla_rl.data.dataset_check import check_datasets
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.report.report import write_report
from vla_rl.interfaces import Policy
from vla_rl.recipe.checks import OFFLINE, Run, check, demonstrations_of
from vla_rl.recipe.recipe import Recipe
from vla_rl.recipe.runs import OfflineRecipe
from vla_rl.rollout.runner import evaluation_mode
from vla_rl.training.bc_loop import train_bc
from vla_rl.training.bc_trainer import BCTrainer, open_bc_dataset
from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint
from vla_rl.training.config import SFTConfig
from vla_rl.training.metrics import MetricLogger
from vla_rl.workflows.collect import collect
from vla_rl.workflows.evaluate_policy import evaluate
from vla_rl.workflows.offline_ppo import improve_by_ppo
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads, outcome, policy_path

EXAMPLES, BASE, FINAL = "examples", "base", "final"


def improve_offline(recipe: OfflineRecipe, folder: Path, show: Callable[[str], None]) -> dict[str, Any]:
    """Improve the recipe's policy from its logged episodes, and evaluate it before and after; resumes where it stopped.

    Raises:
        ConfigError: the recipe has no offline or sft section, or its policy is no checkpoint.
        DatasetError: a dataset is not there.
        ValueError: all logged episodes ended alike, so that there is nothing to learn from.
    """
    check(recipe, OFFLINE)
    limit_threads(recipe)
    run, spec = RunFolder(folder), env_spec(recipe)
    collect_missing(recipe, show)
    section, saved = recipe.offline, None
    if section.evaluate == "before_and_after":
        evaluate_once(recipe, folder, BASE)
    policy = build_policy(recipe, spec)
    if section.method == "recap":
        policy = unconditioned(policy)
        saved = condition(policy, section.recap.guidance)  # Refused before anything is learned.
    with resumed_logger(recipe, folder) as logger:
        improve = _improve_by_ppo if section.method == "ppo" else _clone_chosen
        summary = improve(recipe, folder, policy, logger, show)
    trained = recipe.policy.model_copy(update={"path": str(run.policy)})
    if saved is not None:
        saved.save(run.policy)
        trained = AdvantageConditionedConfig(path=str(run.policy))
    if section.evaluate != "never":
        evaluate_once(recipe.model_copy(update={"policy": trained}), folder, FINAL)
    write_report(folder)
    return summary


def _improve_by_ppo(
    recipe: OfflineRecipe, folder: Path, policy: Policy, logger: MetricLogger, show: Callable[[str], None]
) -> dict[str, Any]:
    data = BCDataset(open_bc_dataset(recipe.sft, policy, env_spec(recipe)).parts, policy.chunk_size)
    return improve_by_ppo(recipe, RunFolder(folder), policy, data, feature_cache(recipe, show), logger, show)


def resumed_logger(recipe: Recipe, folder: Path) -> MetricLogger:
    """What goes on after the last checkpoint's metrics."""
    run = RunFolder(folder)
    checkpoint = latest_checkpoint(run.checkpoints)
    done = checkpoint_step(checkpoint) if checkpoint else 0 if run.metrics.exists() else None
    return MetricLogger(folder, recipe.log, resume_step=done, run_config=recipe.model_dump(mode="json"))


def _clone_chosen(
    recipe: OfflineRecipe, folder: Path, policy: Policy, logger: MetricLogger, show: Callable[[str], None]
) -> dict[str, Any]:
    """Clone what the method chooses."""
    section, sft, spec = recipe.offline, recipe.sft, env_spec(recipe)

    def choose(data: BCDataset) -> BCDataset:
        if section.method == "preferences":
            return _preferred(recipe, policy, data, folder / EXAMPLES, show)
        return _weighted(recipe, policy, data, folder / EXAMPLES, show)

    return train_bc(
        policy, sft, folder, logger.log, recipe.seed, env_spec=spec, choose=choose, trainer=_trainer(section)
    )


def _weighted(
    recipe: OfflineRecipe, policy: Policy, data: BCDataset, folder: Path, show: Callable[[str], None]
) -> BCDataset:
    """The datasets as the method clones them; what it chose is kept in the folder."""
    if not folder.is_dir():
        cache = feature_cache(recipe, show)
        examples, found = choose_examples(recipe.offline, policy, data, recipe.seed, show, cache)
        examples.save(folder, found)
    examples, found = Examples.load(folder)
    _tell(found, show)
    return WeightedDataset(data, examples)


def _preferred(
    recipe: OfflineRecipe, policy: Policy, data: BCDataset, folder: Path, show: Callable[[str], None]
) -> BCDataset:
    """The datasets with their pairs of episodes, which are kept in the folder with how likely they were at first."""
    if not folder.is_dir():
        preferences, found = choose_pairs(recipe.offline, policy, data, recipe.sft, recipe.seed, show)
        preferences.save(folder, found)
    preferences, found = Preferences.load(folder)
    _tell(found, show)
    return PreferenceDataset(data, preferences, recipe.offline.preferences)


def _trainer(config: OfflineConfig) -> type[BCTrainer] | None:
    """What makes an update; None: cloning."""
    if config.method != "preferences":
        return None

    return PreferenceTrainer


def _tell(found: dict[str, float], show: Callable[[str], None]) -> None:
    for name, value in found.items():
        show(f"{name}: {value:.3g}")


def collect_missing(recipe: Recipe, show: Callable[[str], None]) -> None:
    """Collect those of the recipe's `datasets` that are not there, and check that `sft.datasets` are.

    Raises:
        DatasetError: one of these is not there.
    """
    for config in recipe.datasets:
        if not Path(config.dataset).is_dir():
            collect(recipe, config, show)
    check_datasets(d.path for d in demonstrations_of(recipe).datasets)


def feature_cache(recipe: Recipe, show: Callable[[str], None]) -> FeatureCache:
    """Where what the recipe's policy, a checkpoint, makes of datasets is kept."""
    path = policy_path(recipe)
    assert path is not None, "checked before"
    section = recipe.policy.model_dump(mode="json", exclude={"path"})
    return FeatureCache(policy_hash(path), json.dumps(section, sort_keys=True), show)


def evaluate_once(recipe: Recipe, folder: Path, name: str) -> None:
    """Run the recipe's evaluation, unless the run has it."""
    if not RunFolder(folder).evaluation(name).is_file():
        evaluate(recipe, folder, name)


def choose_examples(
    config: OfflineConfig,
    policy: Policy,
    data: BCDataset,
    seed: int,
    show: Callable[[str], None],
    cache: FeatureCache | None = None,
) -> tuple[Examples, dict[str, float]]:
    """What the method clones of the datasets, and figures about it by name; embeddings are kept in the cache."""
    if config.method == "cloning":
        rows = sum(len(part.rows) for part in data.parts)
        return Examples(np.ones(rows)), {}
    needs_critic = config.method != "filtered"
    with evaluation_mode(policy):
        if config.method == "recap":
            check_words_are_read(policy, data)
        if needs_critic:
            data = BCDataset(data.parts, policy.chunk_size)  # What is judged is what is executed, not what is cloned.
        transitions = logged_transitions(policy if needs_critic else None, data, cache)
    transitions.check_outcomes_differ()
    if config.control == "shuffled_outcomes":
        transitions = transitions.with_shuffled_outcomes(seed)
    if not needs_critic:
        return Examples(transitions.success[transitions.episode].astype(np.float64)), {}
    critic = fit_critic(transitions, config.critic, seed, show)
    judged = critic.judge()
    found = judged.figures(transitions, config.critic.discount)
    if config.method == "best_of_n":
        examples, gain = best_of_n(config, policy, data, transitions, critic, seed, show)
        return examples, found | gain
    if config.method == "recap":
        examples, words = worded(config.recap, data, transitions, judged.v, config.critic.discount)
        return examples, found | words
    examples = Examples(advantage_weights(config, transitions, judged))
    return examples, found | {"weights/effective_share": examples.effective_size() / len(transitions)}


def choose_pairs(
    config: OfflineConfig, policy: Policy, data: BCDataset, cloning: SFTConfig, seed: int, show: Callable[[str], None]
) -> tuple[Preferences, dict[str, float]]:
    """Which episodes are preferred to which, and how likely the policy makes them now; figures by name."""
    if config.preferences.file is not None:
        better, worse = read_pairs(config.preferences.file, data.parts)
        alike = np.zeros(len(better), bool)
        if config.control == "shuffled_outcomes":
            swapped = np.random.default_rng(seed).random(len(better)) < 0.5
            better, worse = np.where(swapped, worse, better), np.where(swapped, better, worse)
    else:
        transitions = logged_transitions(None, data)
        transitions.check_outcomes_differ()
        if config.control == "shuffled_outcomes":
            transitions = transitions.with_shuffled_outcomes(seed)
        dataset = np.full(len(transitions.success), -1)
        source = np.repeat(np.arange(len(data.parts)), [len(part.rows) for part in data.parts])
        dataset[transitions.episode] = source  # Of episodes that are learned from at all.
        better, worse = pair_up(transitions, dataset, seed)
        alike = transitions.initial_state[better] == transitions.initial_state[worse]
    episodes = np.unique(np.concatenate([better, worse]))
    show(f"{len(better)} pairs of {len(episodes)} episodes: how likely they are now")
    with evaluation_mode(policy):
        most = decisions_at_once(cloning.batch_size, cloning.grad_accumulation)
        reference = reference_log_probs(policy, data, episodes, most)
    found = {"pairs": float(len(better)), "pairs/same_initial_state": float(alike.mean())}
    found |= {"pairs/likelier": float((reference[better] > reference[worse]).mean())}
    return Preferences(better, worse, reference), found


def _start(recipe: OfflineRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
    improve_offline(recipe, folder, show)
    return outcome(folder)


RUN = Run("train", OFFLINE, _start, datasets=lambda _: ("sft.datasets",))
