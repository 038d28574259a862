"""Ranking of policies by their success in imagination, and its reliability.

    vla-rl world-model rank tabletop_imagination runs/fit/world_model --policy A --policy B ... --output ranking.json

Each policy acts from the same initial states in the world model and in the simulator. Beside the imagined success
stands what the same success head says of the real frames: where that is wrong too, the head is at fault, not the
dynamics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, build_env, episode_specs
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.recipe.runs import FitRecipe
from vla_rl.rollout.runner import run_episodes
from vla_rl.types import Episode
from vla_rl.workflows.imagination.measure_trust import imagined_env, paired
from vla_rl.workflows.recipe_parts import limit_threads, world_model_section
from world_model.trust.ranking import Ranking, judge_episodes, rank

WANTED = 6  # Policies below which a correlation says little.


def rank_policies(
    recipe: FitRecipe, world_model: Path, policies: Sequence[str], file: Path, show: Callable[[str], None] = print
) -> Ranking:
    """Run every policy in both, and write the ranking; returns it (see `world_model.trust.ranking`).

    Initial states are the `validation` split's, `world_model.compare_episodes` per task, each sampled from once.

    Raises:
        ConfigError: fewer than two policies, or one given twice; the recipe has no world_model section.
    """
    if len(policies) < 2 or len(set(policies)) < len(policies):
        raise ConfigError(
            f"--policy: got {', '.join(policies) or 'none'}; ranking needs at least two, each once ({WANTED} or more "
            "to make the correlation worth something)"
        )
    section = world_model_section(recipe)
    limit_threads(recipe)
    device = resolve_device(recipe.device)
    env_config = imagined_env(recipe, world_model)
    outcomes = []
    with (
        closing(build_env(recipe.rollout.placed(recipe.acting_env), record_frames=True)) as real,
        closing(build_env(env_config)) as imagined,
    ):
        for path in policies:
            show(f"{path}: in the simulator and in imagination")
            policy = load_policy(path, device)
            kept = paired(*(_run(policy, env, section.compare_episodes) for env in (real, imagined)))
            judged = judge_episodes(world_model, [r for _, r, _ in kept], env_config.imagination, device)
            success = [r.success for _, r, _ in kept], [i.success for _, _, i in kept]
            outcomes.append((path, [start for start, _, _ in kept], *success, judged))
    ranking = rank(outcomes)
    ranking.save(file)
    return ranking


def _run(policy: Policy, env: VecEnv, num_states: int) -> list[Episode]:
    wanted = EvalConfig(split="validation", episodes_per_task=num_states, temperatures=(1.0,), videos=0)
    episodes, _ = run_episodes(
        policy,
        env,
        episode_specs(env.spec, wanted),
        temperature=1.0,
        seed=wanted.seed,
    )
    return episodes
