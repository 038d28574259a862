"""`vla-rl online`: a frozen policy improved by what came of its own episodes, round by round, and what that came to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.offpolicy.value_guided_config import ValueGuidedConfig
from vla_rl.recipe.checks import check
from vla_rl.recipe.recipe import Recipe
from vla_rl.workflows.offline import BASE, FINAL, collect_missing, evaluate_once, feature_cache
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads

if TYPE_CHECKING:
    from vla_rl.interfaces import Policy, VecEnv
    from vla_rl.offpolicy.config import OnlineConfig
    from vla_rl.offpolicy.features import Draws
    from vla_rl.offpolicy.learner import OffPolicyLearner
    from vla_rl.offpolicy.transitions import Transitions
    from vla_rl.types import EpisodeSpec

REPLAY = "replay"
_NETWORKS, _COLLECT, _DRAWS, _BATCHES, _SHUFFLE = range(5)  # What random numbers are for.


def improve_online(recipe: Recipe, folder: Path, show: Callable[[str], None]) -> dict[str, float]:
    """Improve the recipe's policy from its own episodes, and evaluate it before and after; resumes where it stopped.

    Returns:
        The last round's metrics.

    Raises:
        ConfigError: the recipe lacks a section, or its policy is no checkpoint.
        DatasetError: a dataset is not there. ReplayError: the buffer is damaged, or another policy's.
        ValueError: all logged episodes ended alike.
    """
    from vla_rl.report.report import write_report

    check(recipe, "online")
    assert recipe.online is not None, "just checked"
    limit_threads(recipe)
    run = RunFolder(folder)
    base = build_policy(recipe, env_spec(recipe))
    noise = _noise_shape(recipe.online, base)
    if _reads_datasets(recipe):
        collect_missing(recipe, show)
    if recipe.online.evaluate == "before_and_after":
        evaluate_once(recipe, folder, BASE)
    metrics = _Run(recipe, folder, show, base, noise).finish()
    if recipe.online.evaluate != "never":
        improved = recipe.model_copy(update={"policy": ValueGuidedConfig(path=str(run.policy))})
        evaluate_once(improved, folder, FINAL)
    write_report(folder)
    return metrics


def _reads_datasets(recipe: Recipe) -> bool:
    assert recipe.online is not None, "checked before"
    return recipe.online.prior == "datasets" or recipe.online.warm_updates > 0


def _noise_shape(config: OnlineConfig, base: Policy) -> tuple[int, int] | None:
    """Of the noise that an actor chooses; None: it chooses none.

    Raises:
        ConfigError: the policy's chunks start from none.
    """
    from vla_rl.offpolicy.noise import noise_shape

    return noise_shape(base, config.noise.same_for_all_steps) if config.method == "noise" else None


class _Run:
    """The rounds of one run."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        show: Callable[[str], None],
        base: Policy,
        noise_shape: tuple[int, int] | None,
    ) -> None:
        from vla_rl.offpolicy.replay import Replay

        assert recipe.online is not None, "checked before"
        self.recipe, self.config, self.run, self.show = recipe, recipe.online, RunFolder(folder), show
        self.base, self.noise_shape = base, noise_shape
        self.logged = self._logged() if _reads_datasets(recipe) else None
        prior = self.logged if self.config.prior == "datasets" else None
        policy = feature_cache(recipe, show).fingerprint
        self.replay = Replay(folder / REPLAY, prior, self.config.prior_share, self.config.capacity, policy)
        self.learner: OffPolicyLearner | None = None

    def finish(self) -> dict[str, float]:
        """Make the rounds that remain, and save the policy."""
        from vla_rl.training.metrics import MetricLogger

        done = self._resume()
        step = done if done is not None else 0 if self.run.metrics.exists() else None
        config = self.recipe.model_dump(mode="json")
        metrics: dict[str, float] = {}
        with MetricLogger(self.run.path, self.recipe.log, resume_step=step, run_config=config) as logger:
            if done is None:
                self._warm_up()
            with closing(self.recipe.rollout.placed(self.recipe.env).build()) as env:
                for number in range(done or 0, self.config.rounds):
                    metrics = self._round(number, env)
                    logger.log(number + 1, metrics)
                    self._save(number + 1)
                    self.show(_line(number + 1, self.config.rounds, metrics))
        self._policy().save(self.run.policy)
        return metrics

    # --- one round -------------------------------------------------------------------------------

    def _round(self, number: int, env: VecEnv) -> dict[str, float]:
        """Collect a round's episodes, unless they lie there already, and learn."""
        if self.replay.has(number):
            fresh = self.replay.load(number)
        else:
            fresh = self._collect(number, env)
            self.replay.add(number, fresh)
        if self.learner is None:
            self.learner = self._new_learner(fresh)
        metrics = {
            "rollout/success_rate": float(fresh.success.mean()),
            "rollout/episodes": float((number + 1) * self.config.episodes_per_round),
            "replay/decisions": float(len(self.replay)),
            **_on_policy_figures(self.learner, fresh, self.config.critic.discount),
        }
        return metrics | self._learn(self.config.updates_per_round)

    def _collect(self, number: int, env: VecEnv) -> Transitions:
        from vla_rl.offpolicy.transitions import episode_transitions
        from vla_rl.rollout.runner import collect, derived_seed, evaluation_mode

        count = self.config.episodes_per_round
        numbers = range(number * count, (number + 1) * count)
        policy = self.base if self.learner is None else self._policy()
        with episode_progress(count, f"round {number + 1}", transient=True) as on_episode:
            episodes = collect(
                policy,
                env,
                [self._spec(env, n) for n in numbers],
                temperature=self.config.sampling_temperature,
                seed=[derived_seed(self.recipe.seed, _COLLECT, n) for n in numbers],
                on_episode=on_episode,
            )
        with evaluation_mode(self.base):
            steered = self.noise_shape is not None and policy is not self.base
            fresh = episode_transitions(self.base, episodes, self._draws(number + 1), steered)
        if self.config.control == "shuffled_outcomes":
            return fresh.with_shuffled_outcomes(derived_seed(self.recipe.seed, _SHUFFLE, number))
        return fresh

    def _spec(self, env: VecEnv, number: int) -> EpisodeSpec:
        from vla_rl.types import EpisodeSpec

        tasks = list(env.spec.tasks)
        return EpisodeSpec(tasks[number % len(tasks)], "train", self.config.start_index + number // len(tasks))

    def _learn(self, updates: int) -> dict[str, float]:
        """Make updates; the mean of their metrics."""
        from vla_rl.rollout.runner import derived_seed

        assert self.learner is not None, "made before"
        found: list[dict[str, float]] = []
        for _ in range(updates):
            rng = np.random.default_rng([derived_seed(self.recipe.seed, _BATCHES), self.learner.num_updates])
            batch = self.replay.draw(self.config.critic.batch_size, self.config.critic.discount, rng)
            found.append(self.learner.update(batch))
        return {name: float(np.mean([one[name] for one in found if name in one])) for name in found[-1]}

    # --- what it begins with ---------------------------------------------------------------------

    def _logged(self) -> Transitions:
        """The decisions of the datasets."""
        from vla_rl.data.dataset import BCDataset
        from vla_rl.offpolicy.transitions import logged_transitions
        from vla_rl.rollout.runner import derived_seed, evaluation_mode
        from vla_rl.training.bc_trainer import open_bc_dataset

        assert self.recipe.sft is not None, "checked before"
        opened = open_bc_dataset(self.recipe.sft, self.base, env_spec(self.recipe))
        data = BCDataset(opened.parts, self.base.chunk_size)  # What is judged is what is executed.
        with evaluation_mode(self.base):
            logged = logged_transitions(self.base, data, feature_cache(self.recipe, self.show), self._draws(0))
        logged.check_outcomes_differ()
        if self.config.control == "shuffled_outcomes":
            return logged.with_shuffled_outcomes(derived_seed(self.recipe.seed, _SHUFFLE))
        return logged

    def _draws(self, number: int) -> Draws:
        """What is drawn at each decision: number 0 for the logged ones, then of each round."""
        from vla_rl.offpolicy.features import NO_DRAWS, Draws
        from vla_rl.rollout.runner import derived_seed

        if self.config.critic.targets != "best_of_n" and self.noise_shape is None:
            return NO_DRAWS
        seed = derived_seed(self.recipe.seed, _DRAWS, number) if number else 0  # Logged ones' are kept for all runs.
        return Draws(self.config.candidates, self.config.sampling_temperature, seed, self.noise_shape)

    def _new_learner(self, data: Transitions) -> OffPolicyLearner:
        from vla_rl.offpolicy.critic import new_networks
        from vla_rl.offpolicy.learner import OffPolicyLearner
        from vla_rl.rollout.runner import derived_seed

        seed = derived_seed(self.recipe.seed, _NETWORKS)
        networks = new_networks(self.config.critic, data.embedding, data.chunk.reshape(len(data), -1), seed)
        return OffPolicyLearner(self.config, networks, seed, self.noise_shape)

    def _warm_up(self) -> None:
        """Fit the critic on the logged episodes, where it is to begin so."""
        if self.logged is None:
            return
        self.learner = self._new_learner(self.logged)
        if self.config.warm_updates:
            self.show(f"critic: {self.config.warm_updates} updates on {len(self.logged)} logged decisions")
            prior, self.replay.prior = self.replay.prior, self.logged
            found = self._learn(self.config.warm_updates)
            self.replay.prior = prior
            self.show(f"critic: loss {found['critic/loss']:.3f}")
        self._save(0)

    # --- checkpoints -----------------------------------------------------------------------------

    def _policy(self) -> Policy:
        """The policy as it is improved so far."""
        from vla_rl.offpolicy.steered import SteeredPolicy
        from vla_rl.offpolicy.value_guided import ValueGuidedPolicy

        assert self.learner is not None, "made before"
        config = self.config
        if self.learner.noise is not None:
            return SteeredPolicy(self.base, self.learner.networks, self.learner.noise.actor)
        return ValueGuidedPolicy(
            self.base, self.learner.networks, self.learner.editor, config.candidates, config.sampling_temperature
        )

    def _save(self, rounds: int) -> None:
        from vla_rl.training.checkpoint import checkpoint_path, keep_last, save_checkpoint

        assert self.learner is not None, "made before"
        tensors, state = self.learner.state()
        sizes = self.learner.networks.facts
        save_checkpoint(checkpoint_path(self.run.checkpoints, rounds), tensors, {"learner": state, "sizes": sizes})
        keep_last(self.run.checkpoints, self.config.keep_checkpoints)

    def _resume(self) -> int | None:
        """Rounds that are done, with the learner and the buffer as they were then; None: nothing to go on from."""
        from vla_rl.offpolicy.learner import OffPolicyLearner
        from vla_rl.offpolicy.networks import CriticNetworks
        from vla_rl.rollout.runner import derived_seed
        from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint

        path = latest_checkpoint(self.run.checkpoints)
        if path is None:
            return None
        tensors, state = load_checkpoint(path)
        networks = CriticNetworks.empty(**state["sizes"])
        seed = derived_seed(self.recipe.seed, _NETWORKS)
        self.learner = OffPolicyLearner(self.config, networks, seed, self.noise_shape)
        self.learner.load_state(tensors, state["learner"])
        self.replay.restore(checkpoint_step(path))
        return checkpoint_step(path)


def _on_policy_figures(learner: OffPolicyLearner, fresh: Transitions, discount: float) -> dict[str, float]:
    """What the critic, before it has seen them, says of fresh episodes' executed chunks, against their outcomes."""
    from vla_rl.evaluation.signal import auc

    value = learner.values(fresh)
    success = fresh.success[fresh.episode]
    figures = {"critic/fresh_over_estimation": float((value - fresh.returns(discount)).mean())}
    return figures | ({"critic/fresh_auc": auc(value, success)} if 0 < success.sum() < len(success) else {})


def _line(number: int, rounds: int, metrics: dict[str, Any]) -> str:
    return (
        f"round {number} of {rounds}: {100 * metrics['rollout/success_rate']:.0f} % of episodes succeed, "
        f"{metrics['rollout/episodes']:.0f} so far; critic loss {metrics['critic/loss']:.3f}"
    )
