"""`vla-rl collect` and `vla-rl sft`: the dataset that a recipe describes, and cloning from datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rl.common.distributed.process_group import current
from vla_rl.common.next_command import next_command
from vla_rl.common.progress import step_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.recipe.checks import SFT, demonstrations_of
from vla_rl.recipe.recipe import Recipe, Run, check
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.training.bc_loop import train_bc
from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint
from vla_rl.training.metrics import MetricLogger, SilentLogger
from vla_rl.workflows.recipe_parts import build_policy, env_spec, policy_version
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
        policy = build_policy(recipe, env_config.env_spec())
        if config.plan is not None:
            policy = config.plan.build(policy, str(policy.device))

    for reason in left_out(env_config, config).values():
        show(f"left out: {reason}")

    total = config.episodes_per_task * len(config.tasks or env_config.env_spec().tasks)
    with step_progress("episodes", total, show=True, unit="/s") as advance:

        def on_progress(summary: dict[str, Any]) -> None:
            attempts = summary["attempts"]
            num_successes = sum(rate * attempts[task] for task, rate in summary["success_rate"].items())
            success = 100 * num_successes / max(1, sum(attempts.values()))
            advance(summary["episodes"], f"{success:.0f} % success, {summary['frames_per_second']:.0f} frames/s")

        return collect_dataset(
            env_config,
            config,
            policy=policy,
            policy_version=version,
            seed=recipe.seed,
            on_progress=on_progress,
            place=recipe.rollout.placed,
        )


def clone(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Behavior cloning of the recipe's policy on its datasets; resumes at the folder's last checkpoint.

    Raises:
        ConfigError: the recipe has no sft section.
        DatasetError: a dataset is not there.
    """
    check(recipe, SFT)
    spec = env_spec(recipe)
    with current().reading_parts():
        policy = build_policy(recipe, spec)
    run = RunFolder(folder)
    checkpoint = latest_checkpoint(run.checkpoints)
    done = checkpoint_step(checkpoint) if checkpoint else 0 if run.metrics.exists() else None
    run_config = recipe.model_dump(mode="json")
    if current().is_main:
        logger = MetricLogger(folder, recipe.log, resume_step=done, run_config=run_config)
    else:
        logger = SilentLogger()
    with logger:
        return train_bc(policy, demonstrations_of(recipe), folder, logger.log, recipe.seed, env_spec=spec)


def _start(recipe: Recipe, folder: Path, _: bool, __: Callable[[str], None]) -> list[str]:
    summary = clone(recipe, folder)
    loss = f", loss {summary['loss']:.4f}" if "loss" in summary else ""
    policy = summary["policy"]
    evaluated = next_command("eval", RunFolder(folder).config, f"policy.path={policy}")
    return [f"policy: {policy}  ({summary['steps']} steps{loss})", evaluated]


RUN = Run("sft", SFT, _start, datasets=lambda _: ("sft.datasets",), free=("sft.steps",))
