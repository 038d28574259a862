"""`vla-rl offline` with `method: ppo`: iterations of updates from logged episodes, each admitted or undone."""

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
from vla_rl.offpolicy.iterated import OffPolicyEvaluation, own_chunks, update
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
        self.gate: OffPolicyEvaluation = OffPolicyEvaluation(self.config, data, self.critic, recipe.seed)
        self.state: dict[str, Any] = {"iteration": 0, "lr": self.algo.optim.lr, "admitted": 0, "in_a_row": 0}

    def finish(self, logger: MetricLogger) -> dict[str, Any]:
        """Make the iterations that remain, and save the policy; where it is, how many there were, what was found."""
        self._resume()
        options, state = self.config.ppo, self.state
        before = self.gate.values(self.policy)
        while state["iteration"] < options.iterations and state["in_a_row"] < options.patience:
            before, metrics = self._iterate(before)
            logger.log(state["iteration"], metrics)
            self._save()
        rejected = state["iteration"] - state["admitted"]
        found = self.found | {"ppo/admitted": float(state["admitted"]), "ppo/rejected": float(rejected)}
        found["ppo/q_at_the_end"] = float(before.mean())
        (self.run.path / FOUND).parent.mkdir(exist_ok=True)
        write_text_atomic(self.run.path / FOUND, json.dumps(found, indent=1) + "\n")
        self.policy.save(self.run.policy)
        return {"policy": str(self.run.policy), "steps": state["iteration"]} | found

    def _iterate(self, before: Any) -> tuple[Any, dict[str, float]]:
        """One update, which stays or is undone; the values that hold after it, and metrics."""
        config, state, number = self.config, self.state, self.state["iteration"]
        kept = {name: tensor.detach().clone() for name, tensor in trained_weights(self.policy).items()}
        batch = own_chunks(config, self.policy, self.data, self.critic, self.seed, number)
        lr = state["lr"]
        metrics = batch.metrics | update(config, self.algo, self.policy, batch, self.seed, number, lr)
        after = self.gate.values(self.policy)
        verdict = self.gate.compare(before, after)
        state["iteration"] += 1
        if verdict.admitted:
            state["admitted"], state["in_a_row"], values = state["admitted"] + 1, 0, after
        else:
            load_weights(self.policy, kept, "the policy before the iteration")
            state["in_a_row"], state["lr"], values = state["in_a_row"] + 1, lr * config.ppo.shrink, before
        low, high = verdict.interval.low, verdict.interval.high
        self.show(
            f"iteration {number + 1}: Q {verdict.before:.3f} to {verdict.after:.3f} at {len(before)} held-out "
            f"decisions, {verdict.after - verdict.before:+.4f} [{low:+.4f}, {high:+.4f}]: "
            + ("admitted" if verdict.admitted else f"rejected and undone, lr {state['lr']:.2g}")
        )
        told = {"admitted": verdict.admitted, "lr": lr, "gain": verdict.after - verdict.before}
        told |= {"gain_low": low, "gain_high": high, "q": float(values.mean())}
        return values, metrics | {f"ppo/{name}": float(value) for name, value in told.items()}

    def _save(self) -> None:
        path = checkpoint_path(self.run.checkpoints, self.state["iteration"])
        save_checkpoint(path, trained_weights(self.policy), self.state)
        keep_last(path, 2)

    def _resume(self) -> None:
        if (path := latest_checkpoint(self.run.checkpoints)) is not None:
            tensors, self.state = load_checkpoint(path)
            load_weights(self.policy, tensors, str(path))
