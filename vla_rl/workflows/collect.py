"""`vla-rl collect`: the dataset that a recipe describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import Recipe
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.workflows.recipe_parts import build_policy, policy_version
from vla_rl.workflows.record_dataset import collect_dataset, finished_dataset, left_out


def collect(recipe: Recipe, config: CollectConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Write the dataset that `config` describes: demonstrations of the expert, or the recipe's policy at work."""
    if config.imagined and not recipe.env.is_imagined:
        raise ConfigError(
            "collect.imagined: the recipe's env is no world model; see `vla-rl config tabletop_imagination`"
        )
    env_config = recipe.env if config.imagined else recipe.acting_env
    policy, version = None, "expert"
    if config.source == "policy":
        version = policy_version(recipe)
        if (finished := finished_dataset(env_config, config, version, recipe.seed)) is not None:
            return finished
        policy = build_policy(recipe, env_config.env_spec())  # type: ignore[attr-defined]
        if config.plan is not None:
            policy = config.plan.build(policy, str(policy.device))

    for reason in left_out(env_config, config).values():
        show(f"left out: {reason}")

    def on_progress(summary: dict[str, Any]) -> None:
        attempts = summary["attempts"]
        num_successes = sum(rate * attempts[task] for task, rate in summary["success_rate"].items())
        success = 100 * num_successes / max(1, sum(attempts.values()))
        show(
            f"{summary['episodes']} of {summary['episodes_wanted']} episodes, {success:.0f} % success, "
            f"{summary['frames_per_second']:.0f} frames/s"
        )

    return collect_dataset(
        env_config,
        config,
        policy=policy,
        policy_version=version,
        seed=recipe.seed,
        on_progress=on_progress,
        place=recipe.rollout.placed,
    )
