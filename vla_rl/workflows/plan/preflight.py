"""`vla-rl plan --preflight`: from a few of the base policy's episodes, what RL would learn from."""

from __future__ import annotations

from functools import partial

from vla_rl.common.progress import episode_progress
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.workflows.recipe_parts import build_policy, env_spec


def play_groups(recipe: TrainRecipe, num_episodes: int) -> Evaluation:
    """Play groups of the recipe's size from `train` states, at its temperature, and each state once greedily.

    Args:
        num_episodes: about so many sampled ones, shared by the tasks; at least one group of each is played.
    """
    train, spec = recipe.train, env_spec(recipe)
    config = EvalConfig(
        split="train",
        episodes_per_task=max(1, round(num_episodes / (train.group_size * len(spec.tasks)))),
        samples_per_state=train.group_size,
        temperatures=(0.0, train.temperature),
        approximate=True,
        videos=0,
    )
    policy, env = build_policy(recipe, spec), recipe.rollout.placed(recipe.acting_env)
    return evaluate(policy, env, config, progress=partial(episode_progress, show=True))
