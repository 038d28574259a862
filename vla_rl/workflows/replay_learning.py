"""Learning from a replay buffer, for `online` and `hil`: prior, critic, policy, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.algorithms.offpolicy.config import PRIOR_SHARE, OnlineConfig, ReplayLearningConfig
from vla_rl.algorithms.offpolicy.critic import new_networks
from vla_rl.algorithms.offpolicy.features import NO_DRAWS, Draws
from vla_rl.algorithms.offpolicy.learner import OffPolicyLearner
from vla_rl.algorithms.offpolicy.networks import CriticNetworks
from vla_rl.algorithms.offpolicy.noise import SteeredPolicy, noise_shape
from vla_rl.algorithms.offpolicy.replay import Replay
from vla_rl.algorithms.offpolicy.transitions import Transitions, logged_transitions
from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy
from vla_rl.common.run_folder import RunFolder
from vla_rl.data.dataset import BCDataset
from vla_rl.evaluation.signal import auc
from vla_rl.interfaces import Policy
from vla_rl.recipe.checks import demonstrations_of
from vla_rl.recipe.recipe import Recipe
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.training.bc_trainer import open_bc_dataset
from vla_rl.training.checkpoint import (
    checkpoint_path,
    checkpoint_step,
    keep_last,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.offline import feature_cache
from vla_rl.workflows.recipe_parts import env_spec

REPLAY = "replay"
CAPACITY = 200_000  # Fresh decisions held: some 5,000 episodes; the oldest leave.
KEPT = 2  # Checkpoints, one of each round.
NETWORKS, COLLECT, DRAWS, BATCHES, SHUFFLE = range(5)  # What random numbers are for.


class ReplayLearning:
    """A frozen policy, a replay buffer, and the critic that learns from it.

    Attributes:
        base: the frozen policy. logged: the datasets' decisions, where any are read. learner: None before there is
            anything to learn from.
    """

    needs_failures = True  # Among logged episodes: without any, nothing else tells good from bad.

    def __init__(
        self,
        recipe: Recipe,
        config: ReplayLearningConfig,
        folder: Path,
        show: Callable[[str], None],
        base: Policy,
        noise_shape: tuple[int, int] | None = None,
        person_is_prior: bool = False,
    ) -> None:
        self.recipe, self.config, self.run, self.show = recipe, config, RunFolder(folder), show
        self.base, self.noise_shape = base, noise_shape
        self.logged = self._logged() if config.reads_datasets else None
        prior = self.logged if config.prior == "datasets" else None
        policy = feature_cache(recipe, base, show).fingerprint
        self.replay = Replay(folder / REPLAY, prior, PRIOR_SHARE, CAPACITY, policy, person_is_prior)
        self.learner: OffPolicyLearner | None = None
        self.more: dict[str, Any] = {}

    def learn(self, updates: int) -> dict[str, float]:
        """Make updates; the mean of their metrics."""
        assert self.learner is not None, "made before"
        found: list[dict[str, float]] = []
        for _ in range(updates):
            rng = np.random.default_rng([derived_seed(self.recipe.seed, BATCHES), self.learner.num_updates])
            batch = self.replay.draw(self.config.critic.batch_size, self.config.critic.discount, rng)
            found.append(self.learner.update(batch))
        names = dict.fromkeys(name for one in found for name in one)  # An update that was skipped has others.
        return {name: float(np.mean([one[name] for one in found if name in one])) for name in names}

    def _logged(self) -> Transitions:
        """The decisions of the datasets."""
        opened = open_bc_dataset(demonstrations_of(self.recipe), self.base, env_spec(self.recipe))
        data = BCDataset(opened.parts, self.base.chunk_size)  # As many actions as are executed, not as are cloned.
        with evaluation_mode(self.base):
            logged = logged_transitions(
                self.base, data, feature_cache(self.recipe, self.base, self.show), self.draws(0)
            )
        if self.needs_failures:
            logged.check_outcomes_differ()
        if self.config.control == "shuffled_outcomes":
            return logged.with_shuffled_outcomes(derived_seed(self.recipe.seed, SHUFFLE))
        return logged

    def draws(self, number: int) -> Draws:
        """What is drawn at each decision: number 0 for the logged ones, then of each round."""
        needed = self.config.critic.targets == "best_of_n" or self.config.method == "edits"
        if not needed and self.noise_shape is None:
            return NO_DRAWS
        seed = derived_seed(self.recipe.seed, DRAWS, number) if number else 0  # Logged ones' are kept for all runs.
        return Draws(self.config.candidates, seed, self.noise_shape)

    def learner_for(self, data: Transitions) -> OffPolicyLearner:
        """The learner; a new one, which normalizes by these decisions, where there is none yet."""
        if self.learner is None:
            self.learner = self._new_learner(data)
        return self.learner

    def _new_learner(self, data: Transitions) -> OffPolicyLearner:
        seed = derived_seed(self.recipe.seed, NETWORKS)
        networks = new_networks(self.config.critic, data.embedding, data.chunk.reshape(len(data), -1), seed)
        return OffPolicyLearner(self.config, networks, seed, self.noise_shape, self._action_bounds)

    @property
    def _action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """What the environment clips actions to, which edits stay within."""
        spec = env_spec(self.recipe)
        return spec.action_low, spec.action_high

    def warm_up(self) -> None:
        """Fit the critic on the logged episodes, where it is to begin so."""
        if self.logged is None:
            return
        self.learner = self._new_learner(self.logged)
        if self.config.warm_updates:
            self.show(f"critic: {self.config.warm_updates} updates on {len(self.logged)} logged decisions")
            prior, self.replay.prior = self.replay.prior, self.logged
            found = self.learn(self.config.warm_updates)
            self.replay.prior = prior
            self.show(f"critic: loss {found['critic/loss']:.3f}")
        self.save(0)

    # --- checkpoints -----------------------------------------------------------------------------

    def policy(self) -> Policy:
        """The policy as it is improved so far."""
        assert self.learner is not None, "made before"
        config = self.config
        if self.learner.noise is not None:
            return SteeredPolicy(self.base, self.learner.networks, self.learner.noise.actor)
        return ValueGuidedPolicy(
            self.base,
            self.learner.networks,
            self.learner.editor,
            config.candidates,
            config.choose_by,
        )

    def save(self, step: int, more: dict[str, Any] | None = None) -> None:
        """Save the learner, and JSON-able values that `more` has again after `resume`."""
        assert self.learner is not None, "made before"
        tensors, state = self.learner.state()
        sizes = self.learner.networks.facts
        rest = {"learner": state, "sizes": sizes, "more": more or {}}
        path = save_checkpoint(checkpoint_path(self.run.checkpoints, step), tensors, rest)
        keep_last(path, KEPT)

    def resume(self) -> int | None:
        """The step of the newest checkpoint, with the learner as it was then; None: nothing to go on from."""
        path = latest_checkpoint(self.run.checkpoints)
        if path is None:
            return None
        tensors, state = load_checkpoint(path)
        networks = CriticNetworks.empty(**state["sizes"])
        seed = derived_seed(self.recipe.seed, NETWORKS)
        self.learner = OffPolicyLearner(self.config, networks, seed, self.noise_shape, self._action_bounds)
        self.learner.load_state(tensors, state["learner"])
        self.more = state.get("more", {})
        return checkpoint_step(path)


def spec_of(tasks: Sequence[str], start_index: int, number: int) -> EpisodeSpec:
    """The initial state of a run's episode: tasks in turn, each with the next state of the train split."""
    return EpisodeSpec(tasks[number % len(tasks)], "train", start_index + number // len(tasks))


def noise_shape_of(config: OnlineConfig, base: Policy) -> tuple[int, int] | None:
    """Of the noise that an actor chooses; None: it chooses none.

    Raises:
        ConfigError: the policy's chunks start from none.
    """
    return noise_shape(base) if config.method == "noise" else None


Judged = tuple[np.ndarray, np.ndarray, np.ndarray]


def judged(learner: OffPolicyLearner, fresh: Transitions, discount: float) -> Judged:
    """What the critic says of executed chunks, their discounted outcomes, and whether the episodes succeeded: (N,)."""
    return learner.values(fresh), fresh.returns(discount), fresh.success[fresh.episode]


def fresh_figures(parts: Sequence[Judged]) -> dict[str, float]:
    """How the critic judged fresh episodes before it had learned from them, against how they ended."""
    if not parts:
        return {}
    value, returns, success = (np.concatenate([part[i] for part in parts]) for i in range(3))
    figures = {"critic/fresh_over_estimation": float((value - returns).mean())}
    return figures | ({"critic/fresh_auc": auc(value, success)} if 0 < success.sum() < len(success) else {})
