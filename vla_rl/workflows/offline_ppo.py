"""`run: offline` with `method: ppo`: iterations of updates from logged episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import RunFolder
from vla_rl.data.dataset import BCDataset
from vla_rl.distributed.weights import load_weights, trained_weights
from vla_rl.interfaces import Policy
from vla_rl.offpolicy.critic import Critic, fit_critic
from vla_rl.offpolicy.features import FeatureCache
from vla_rl.offpolicy.iterated import own_chunks, update
from vla_rl.offpolicy.transitions import logged_transitions
from vla_rl.recipe.runs import OfflineRecipe
from vla_rl.rollout.runner import evaluation_mode
from vla_rl.training.checkpoint import checkpoint_path, keep_last, latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.training.metrics import MetricLogger

FOUND = "examples/found.json"


class OfflinePPO:
    """The iterations of one run; resumes after its last one.

    Args:
        policy: improved in place. data: the logged episodes, with chunks as the policy executes them.
        cache: keeps the policy's embeddings.
    """

    def __init__(
        self,
        recipe: OfflineRecipe,
        folder: Path,
        policy: Policy,
        data: BCDataset,
        cache: FeatureCache,
        show: Callable[..., None],
    ) -> None:
        if policy.no_rl_reason:
            raise ValueError(f"RL cannot train this policy: {policy.no_rl_reason}")
        assert recipe.algo is not None, "checked with offline.method=ppo"
        self.config, self.algo, self.seed = recipe.offline, recipe.algo, recipe.seed
        self.run, self.policy, self.data, self.show = RunFolder(folder), policy, data, show
        with evaluation_mode(policy):
            transitions = logged_transitions(policy, data, cache)
        transitions.check_outcomes_differ()
        if self.config.control == "shuffled_outcomes":
            transitions = transitions.with_shuffled_outcomes(recipe.seed)
        self.critic: Critic = fit_critic(transitions, self.config.critic, recipe.seed, show)
        self.found = self.critic.judge().figures(transitions, self.config.critic.discount)
        self.done = 0

    def finish(self, logger: MetricLogger) -> dict[str, Any]:
        """Make the iterations that remain, and save the policy; where it is, how many there were, what was found."""
        if (path := latest_checkpoint(self.run.checkpoints)) is not None:
            tensors, state = load_checkpoint(path)
            load_weights(self.policy, tensors, str(path))
            self.done = state["iteration"]
        while self.done < self.config.ppo.iterations:
            batch = own_chunks(self.config, self.policy, self.data, self.critic, self.seed, self.done)
            metrics = batch.metrics | update(self.config, self.algo, self.policy, batch, self.seed, self.done)
            self.done += 1
            self.show(f"iteration {self.done} of {self.config.ppo.iterations}")
            logger.log(self.done, metrics)
            path = checkpoint_path(self.run.checkpoints, self.done)
            save_checkpoint(path, trained_weights(self.policy), {"iteration": self.done})
            keep_last(path, 2)
        (self.run.path / FOUND).parent.mkdir(exist_ok=True)
        write_text_atomic(self.run.path / FOUND, json.dumps(self.found, indent=1) + "\n")
        self.policy.save(self.run.policy)
        return {"policy": str(self.run.policy), "steps": self.done} | self.found
