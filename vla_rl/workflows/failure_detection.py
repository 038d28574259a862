"""`vla-rl failure fit` and `eval`: the policy's episodes, run or read, and embedded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import yaml

from real_robot.failure.conformal import EpisodesConfig, FailureConfig
from real_robot.failure.detector import fit
from real_robot.failure.measure import FailureReport, detectors_in, evaluate
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.progress import episode_progress
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.data.embeddings import EmbeddedEpisodes, embed_dataset, embed_episodes
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.evaluate import EvalConfig, build_env, episode_specs, policy_hash
from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.recipe.checks import FAILURE
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import FailureRecipe
from vla_rl.rollout.runner import derived_seed, evaluation_mode, run_episodes
from vla_rl.workflows.recipe_parts import build_policy

EMBEDDED = "embeddings"
FINGERPRINTS = "fingerprints"  # in the note beside them: of the datasets


def fit_failure(
    recipe: FailureRecipe, folder: Path, show: Callable[[str], None], episodes_of: Path | None = None
) -> list[Path]:
    """Fit and calibrate the recipe's failure detectors on its policy's episodes; returns their folders.

    Args:
        episodes_of: a run's folder whose embedded episodes are used again, if they are those asked for; None: `folder`.

    Raises:
        ConfigError: the recipe has no failure section, or its policy is no checkpoint.
    """
    section, path = _section(recipe), _policy_path(recipe)
    store = (episodes_of or folder) / EMBEDDED
    train = embedded(recipe, section.fit_on, store / "fit_on", show)
    calibration = embedded(recipe, section.calibrate_on, store / "calibrate_on", show)
    return fit(section, train, calibration, folder, policy_name=path.name, seed=recipe.seed, show=show)


def evaluate_failure(
    recipe: FailureRecipe, folder: Path, show: Callable[[str], None], episodes_of: Path | None = None
) -> tuple[FailureReport, Path]:
    """Measure the detectors in a run's folder on held-out episodes; write failure.json and failure.html.

    Returns:
        the report and the page's path.
    """
    section = _section(recipe)
    detectors_in(folder)  # Refuses a folder without any, before episodes are run.
    held_out = embedded(recipe, section.evaluate_on, (episodes_of or folder) / EMBEDDED / "evaluate_on", show)
    report = evaluate(folder, held_out, seed=recipe.seed)
    return report, report.save(folder)


def embedded(
    recipe: FailureRecipe, config: EpisodesConfig, folder: Path, show: Callable[[str], None]
) -> EmbeddedEpisodes:
    """Episodes of the recipe's policy, embedded by it: recorded ones, or ones run now; kept in `folder`.

    Raises:
        ConfigError: `folder` holds episodes of another policy or from other sources.
    """
    wanted = policy_hash(_policy_path(recipe))
    note = folder.with_suffix(".yaml")
    asked = f"policy_hash: {wanted}\nevery: {_section(recipe).every}\n{dump_yaml(config)}{dump_yaml(recipe.acting_env)}"
    asked += yaml.safe_dump({FINGERPRINTS: [_fingerprint(dataset.path) for dataset in config.datasets]})
    if folder.is_dir() and note.is_file():
        if not _same_values(note.read_text(), asked):
            raise ConfigError(
                f"{folder} holds episodes embedded for another policy, environment or source, or of datasets that have "
                f"changed since (see {note.name}); delete it, or choose another --output"
            )
        return EmbeddedEpisodes.load(folder)
    env = recipe.acting_env
    policy = build_policy(recipe, env.env_spec())
    with evaluation_mode(policy):
        if config.datasets:
            every = _section(recipe).every
            parts = [embed_dataset(policy, d, wanted, every, config.same_policy) for d in config.datasets]
        else:
            parts = [_run(recipe, policy, config, wanted)]
    episodes = EmbeddedEpisodes.concatenate(parts)
    episodes.save(folder)
    write_text_atomic(note, asked)
    show(f"{folder.name}: {len(episodes)} episodes, {100 * episodes.success.mean():.0f} % success")
    return episodes


def _same_values(note: str, asked: str) -> bool:
    """Whether two YAML texts say the same, in whatever order: versions write an option's place differently.

    What datasets hold is compared where both say it: a dataset may be gone.
    """
    before, now = yaml.safe_load(note), yaml.safe_load(asked)
    held, holds = before.pop(FINGERPRINTS, []), now.pop(FINGERPRINTS)
    return before == now and all(a == b for a, b in zip(held, holds, strict=False) if a and b)


def _fingerprint(dataset: str) -> str:
    """What a dataset on this machine holds; "" of one that is gone, or on the Hub, where a revision says it."""
    return LeRobotSource(dataset).fingerprint() if Path(dataset).exists() else ""


def _run(recipe: FailureRecipe, policy: Policy, config: EpisodesConfig, policy_hash: str) -> EmbeddedEpisodes:
    """Run the policy in the recipe's environment, some episodes at a time, and embed what it saw."""
    if _section(recipe).every not in (0, policy.chunk_size):
        raise ConfigError(
            f"failure.every: got {_section(recipe).every}; new episodes are embedded once a chunk "
            f"({policy.chunk_size} steps). Leave it at 0, or give recorded datasets"
        )
    parts = []
    with closing(build_env(recipe.rollout.placed(recipe.acting_env))) as env:
        states = EvalConfig(
            split=config.split, episodes_per_task=config.episodes_per_task, start_index=config.start_index
        )
        specs = episode_specs(env.spec, states)
        size = 4 * env.num_envs  # Images of a whole set would not fit the memory.
        with episode_progress(len(specs)) as on_episode:
            for start in range(0, len(specs), size):
                episodes, _ = run_episodes(
                    policy,
                    env,
                    specs[start : start + size],
                    temperature=config.temperature,
                    seed=derived_seed(recipe.seed, start),
                    on_episode=on_episode,
                )
                parts.append(embed_episodes(policy, episodes, policy_hash))
    return EmbeddedEpisodes.concatenate(parts)


def _section(recipe: FailureRecipe) -> FailureConfig:
    if not isinstance(recipe.failure, FailureConfig):
        raise ConfigError("failure: the recipe has none of kind 'conformal'; see `vla-rl config tabletop_failure`")
    return recipe.failure


def _policy_path(recipe: FailureRecipe) -> Path:
    path = getattr(recipe.policy, "path", None)
    if path is None:
        raise ConfigError(
            "policy.path: a failure detector belongs to one checkpoint; give its folder or pretrained:NAME"
        )
    return resolve_path(path)


def fit_run(episodes_of: Path | None) -> Run[FailureRecipe]:
    """Return `failure fit`; see `fit_failure`."""
    return Run(
        "failure fit",
        FAILURE,
        lambda recipe, folder, _, show: [
            f"detector: {path}" for path in fit_failure(recipe, folder, show, episodes_of)
        ],
    )
