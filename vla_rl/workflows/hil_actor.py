"""The actor of `run: hil` in a simulator: runs episodes with the scripted person beside the newest published policy.

A process of its own, started as `python -m vla_rl.workflows.hil_actor RUN_FOLDER`. Each episode is a shard of the
run's recording as soon as it has ended, so that a killed actor loses only those under way, and runs none again. With
`hil.practice` each begins in the scene that the last one has left; where the actor starts, a person resets the scenes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from real_robot.operator.recorder import Recording
from real_robot.operator.sim_interventions import InterventionOutcome, run_interventions
from vla_rl.algorithms.offpolicy.published import Followed
from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.data.lerobot_io import read_shards, staging_folder
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.recipe.checks import HIL
from vla_rl.recipe.recipe import check, load_recipe
from vla_rl.recipe.runs import FIRST_STATE, HilRecipe, PracticeConfig
from vla_rl.rollout.practice import Practice, PracticeEnv
from vla_rl.rollout.runner import RunningEpisode, derived_seed
from vla_rl.types import EnvSpec
from vla_rl.workflows.rac import OPERATOR_STEPS, longer, operator_options
from vla_rl.workflows.recipe_parts import limit_threads
from vla_rl.workflows.replay_learning import COLLECT, spec_of

PUBLISHED, RECORDING = "published", "episodes"
EPISODES_PER_TURN = 20  # With one policy, at most; then the newest published one acts.


def act(recipe: HilRecipe, folder: Path, show: Callable[[str], None]) -> None:
    """Run the episodes of the recipe's `hil` section that are not recorded yet.

    Raises:
        PublishedError: no policy is published that can act.
        ConfigError: the environment has no horizons to lengthen.
    """
    config, dataset = recipe.hil, folder / RECORDING
    assert config is not None, "checked by the learner"
    if dataset.is_dir():
        return  # It was finished before.
    limit_threads(recipe)
    spec = recipe.env.env_spec()
    rows = [row for found, _, _ in read_shards(staging_folder(dataset)) for row in found]
    per_turn = min(EPISODES_PER_TURN, config.publish_every)
    tasks = list(spec.tasks)
    if config.practice is not None:  # A person's resets lead to the task's own initial states.
        tasks = [task for task in tasks if task != config.practice.reset_task]
    done = {(row["task"] if len(tasks) > 1 else tasks[0], row["index"]) for row in rows}
    spent = sum(row["interventions"] for row in rows)
    numbered = [(number, spec_of(tasks, FIRST_STATE, number)) for number in range(config.episodes)]
    numbered = [(number, one) for number, one in numbered if (one.task, one.index) not in done]
    if not numbered:
        return
    newest = Followed(
        folder / PUBLISHED, lambda policy, _: check_fit(policy, spec), str(resolve_device(recipe.device)), show
    )
    recording = Recording(dataset, spec.control_hz, spec.kind)
    with closing(longer(recipe.env, spec.horizon, OPERATOR_STEPS).build()) as env:
        practice = None if config.practice is None else new_practice(config.practice, tasks[0], env)
        while numbered:
            newest.look()
            first, turn = numbered[0][0], [one for _, one in numbered[:per_turn]]
            numbered = numbered[per_turn:]
            left = None if config.interventions is None else max(0, config.interventions - spent)
            outcomes = run_interventions(
                newest.policy,
                env,
                practice.specs(turn) if practice else turn,
                recording,
                horizons=spec.horizon,
                options=operator_options(config.person, budget=left),
                policy_version=newest.published.version,
                round=newest.published.number,
                seed=derived_seed(recipe.seed, COLLECT, first),
                on_episode=_told(practice),
            )
            spent += sum(one.intervened for one in outcomes)
            resets = f", {practice.num_resets} resets since the start" if practice else ""
            show(f"{config.episodes - len(numbered)} of {config.episodes} episodes, {spent} interventions{resets}")


def new_practice(config: PracticeConfig, forward: str, env: VecEnv) -> Practice:
    """What is next in each environment's scene, where the scene is not reset before every episode.

    Raises:
        ConfigError: the environment's robots cannot go on where an episode has ended.
    """
    if not isinstance(env, PracticeEnv):
        raise ConfigError(f"hil.practice: {env.spec.kind} knows no way home, where the next episode could begin")
    return Practice(env, forward, config.reset_task, config.attempts)


def _told(practice: Practice | None) -> Callable[[RunningEpisode, InterventionOutcome], None]:
    """What is done with an episode that has ended."""
    if practice is None:
        return lambda *_: None
    return lambda episode, outcome: practice.ended(episode.env_id, episode.spec, outcome.success, outcome.lost)


def check_fit(policy: Policy, spec: EnvSpec) -> None:
    """Refuse a policy that cannot act in an environment.

    Raises:
        ValueError: it reads a camera that is not there, or has other sizes.
    """
    if lacking := sorted(set(policy.cameras) - set(spec.cameras)):
        raise ValueError(f"it reads camera {lacking[0]!r}; there are {', '.join(spec.cameras)}")
    if policy.action_dim != spec.action_dim:
        raise ValueError(f"its actions have {policy.action_dim} numbers, {spec.kind}'s {spec.action_dim}")


def main(folder: Path) -> None:
    """Run the episodes of a run."""
    act(check(load_recipe(RunFolder(folder).config), HIL), folder, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
