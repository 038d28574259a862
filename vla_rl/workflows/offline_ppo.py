"""`run: offline` with `method: ppo`: iterations of updates from logged episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vla_rl.algorithms.offpolicy.critic import fit_critic
from vla_rl.algorithms.offpolicy.features import FeatureCache
from vla_rl.algorithms.offpolicy.iterated import own_chunks, update
from vla_rl.algorithms.offpolicy.transitions import logged_transitions
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.weights import load_weights, trained_weights
from vla_rl.common.run_folder import RunFolder
from vla_rl.data.dataset import BCDataset
from vla_rl.interfaces import Policy
from vla_rl.recipe.runs import OfflineRecipe
from vla_rl.rollout.runner import evaluation_mode
from vla_rl.training.checkpoint import checkpoint_path, keep_last, latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.training.metrics import MetricLogger

FOUND = "examples/found.json"


def improve_by_ppo(
    recipe: OfflineRecipe,
    run: RunFolder,
    policy: Policy,
    data: BCDataset,
    cache: FeatureCache,
    logger: MetricLogger,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Make the iterations that remain after the last checkpoint, and save the policy.

    Args:
        policy: improved in place. data: the logged episodes, with chunks as the policy executes them.
        cache: keeps the policy's embeddings.

    Returns:
        Where the policy is, how many iterations there were, what was found of the critic.
    """
    if policy.no_rl_reason:
        raise ValueError(f"RL cannot train this policy: {policy.no_rl_reason}")
    assert recipe.algo is not None, "checked with offline.method=ppo"
    config, seed, done = recipe.offline, recipe.seed, 0
    with evaluation_mode(policy):
        transitions = logged_transitions(policy, data, cache)
    transitions.check_outcomes_differ()
    if config.control == "shuffled_outcomes":
        transitions = transitions.with_shuffled_outcomes(seed)
    critic = fit_critic(transitions, config.critic, seed, show)
    found = critic.judge().figures(transitions, config.critic.discount)
    if (path := latest_checkpoint(run.checkpoints)) is not None:
        tensors, state = load_checkpoint(path)
        load_weights(policy, tensors, str(path))
        done = state["iteration"]
    while done < config.ppo.iterations:
        batch = own_chunks(config, policy, data, critic, seed, done)
        metrics = batch.metrics | update(config, recipe.algo, policy, batch, seed, done)
        done += 1
        show(f"iteration {done} of {config.ppo.iterations}")
        logger.log(done, metrics)
        path = checkpoint_path(run.checkpoints, done)
        save_checkpoint(path, trained_weights(policy), {"iteration": done})
        keep_last(path, 2)
    (run.path / FOUND).parent.mkdir(exist_ok=True)
    write_text_atomic(run.path / FOUND, json.dumps(found, indent=1) + "\n")
    policy.save(run.policy)
    return {"policy": str(run.policy), "steps": done} | found
