"""The Python API: what scripts and notebooks need, under the names that `import vla_rl` gives.

    import vla_rl

    recipe = vla_rl.load_recipe("tabletop_grpo", ["train.iterations=8"])
    policy = vla_rl.load_policy(vla_rl.train(recipe, "runs/first"))
    print(vla_rl.evaluate(policy, recipe).rate("sampled"))

Each does what the command of that name does. Weights are loaded, and simulators started, when a function asks for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.run_folder import open_run
from vla_rl.config import validate
from vla_rl.data.hub import pinned
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.evaluation.evaluate import evaluate as run_evaluation
from vla_rl.evaluation.results import Evaluation
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import TRAIN, Recipe, check, load_recipe
from vla_rl.training.train import train as run_training

__all__ = ["Recipe", "evaluate", "load_policy", "load_recipe", "make_env", "train"]


def make_env(recipe: Recipe | str | Path, num_envs: int | None = None, record_frames: bool = False) -> VecEnv:
    """Build the environment that a recipe's policy acts in: its `real_env` where it has one, else its `env`.

    Args:
        recipe: or the name or path of one.
        num_envs: environments stepped together; None: as the recipe says.
        record_frames: keep what is seen after every control step, for videos.

    Returns:
        the environment; close it when done (`contextlib.closing`).

    Raises:
        ConfigError: the recipe, or what its environment needs, is missing or wrong.
    """
    recipe = _loaded(recipe)
    recipe.acting_env.check_machine()
    return recipe.acting_env.build(num_envs=num_envs, record_frames=record_frames)


def train(recipe: Recipe | str | Path, output: str | Path | None = None, resume: bool = False) -> Path:
    """Post-train a policy by RL, as `vla-rl train` does; return the folder of the resulting policy.

    Args:
        recipe: or the name or path of one.
        output: the run's folder; None: `runs/NAME-DATE-TIME`, or with `resume` the newest of these.
        resume: go on with the run in that folder, from its last whole checkpoint.

    Raises:
        ConfigError: the recipe is wrong, the folder is in use, or there is nothing to resume.
        ValueError: the policy never succeeds, so there is nothing to learn from.
        TrainingDivergedError: the loss, the gradients or the weights became NaN or infinite.
    """
    loaded = _loaded(recipe)
    loaded.check_machine()
    checked = check(loaded, TRAIN)
    checked = pinned(checked, print, "sft.datasets") if checked.needs_demonstrations else checked
    folder = open_run(checked, None if output is None else Path(output), resume, free=("train.iterations",))
    return run_training(checked, folder, resume)


def evaluate(policy: Policy | str | Path, recipe: Recipe | str | Path, **options: Any) -> Evaluation:
    """Evaluate a policy in a recipe's environment, by its `eval` section; writes nothing, films nothing.

    Args:
        policy: or the folder of one, or pretrained:NAME.
        recipe: or the name or path of one.
        options: of the `eval` section, in place of the recipe's (`episodes_per_task=20`, `temperatures=[1.0]`).

    Returns:
        every episode and how it was made; `.rate(mode)` has a success rate with its interval, `.save(file)` writes it.

    Raises:
        ConfigError: an option is unknown or out of range, or the recipe is wrong.
        EvaluationError: unknown task, or more states asked than the split has.
    """
    recipe = _loaded(recipe)
    recipe.check_machine()
    config = validate(EvalConfig, recipe.eval.model_dump() | {"videos": 0} | options, prefix="eval")
    env = recipe.model_copy(update={"eval": config}).acting_env  # eval.approximate says which.
    if isinstance(policy, str | Path):
        folder = resolve_path(policy)
        return run_evaluation(load_policy(folder, resolve_device(recipe.device)), env, config, policy_path=folder)
    return run_evaluation(policy, env, config)


def _loaded(recipe: Recipe | str | Path) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
