"""`run: online`: a frozen policy improved round by round by a critic of its own episodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.algorithms.offpolicy.transitions import Transitions, episode_transitions
from vla_rl.algorithms.offpolicy.value_guided_config import ValueGuidedConfig
from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.verdict import outcome
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.recipe.checks import ONLINE
from vla_rl.recipe.recipe import Run, check
from vla_rl.recipe.runs import OnlineRecipe
from vla_rl.rollout.runner import collect, derived_seed, evaluation_mode
from vla_rl.rollout.source import with_steps_after_success
from vla_rl.workflows.offline import BASE, FINAL, collect_missing, evaluate_once, resumed_logger
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads
from vla_rl.workflows.replay_learning import (  # fmt: skip
    COLLECT,
    SHUFFLE,
    ReplayLearning,
    fresh_figures,
    judged,
    noise_shape_of,
    spec_of,
)

SUCCEEDED = "succeeded"  # In a segment's notes: how each of its episodes ended, whatever outcomes are learned from.


def improve_online(recipe: OnlineRecipe, folder: Path, show: Callable[[str], None]) -> dict[str, float]:
    """Improve the recipe's policy from its own episodes, and evaluate it before and after; resumes where it stopped.

    Returns:
        The last round's metrics.

    Raises:
        ConfigError: the recipe lacks a section, or its policy is no checkpoint.
        DatasetError: a dataset is not there. ReplayError: the buffer is damaged, or another policy's.
        ValueError: all logged episodes ended alike.
    """
    check(recipe, ONLINE)
    limit_threads(recipe)
    run = RunFolder(folder)
    base = build_policy(recipe, env_spec(recipe))
    noise = noise_shape_of(recipe.online, base)  # Refused before any work.
    if recipe.online.reads_datasets:
        collect_missing(recipe, show)
    if recipe.online.evaluate == "before_and_after":
        evaluate_once(recipe, folder, BASE)
    metrics = _Run(recipe, folder, show, base, noise).finish()
    if recipe.online.evaluate != "never":
        improved = recipe.model_copy(update={"policy": ValueGuidedConfig(path=str(run.policy))})
        evaluate_once(improved, folder, FINAL)
    write_report(folder)
    return metrics


class _Run(ReplayLearning):
    """The rounds of one run."""

    def __init__(
        self,
        recipe: OnlineRecipe,
        folder: Path,
        show: Callable[[str], None],
        base: Policy,
        noise_shape: tuple[int, int] | None,
    ) -> None:
        super().__init__(recipe, recipe.online, folder, show, base, noise_shape)
        self.rounds = recipe.online

    def finish(self) -> dict[str, float]:
        """Make the rounds that remain, and save the policy."""
        done = self.resume()
        if done is not None:
            self.replay.restore(done)
        metrics: dict[str, float] = {}
        with resumed_logger(self.recipe, self.run.path) as logger:
            if done is None:
                self.warm_up()
            acting = with_steps_after_success(self.recipe.rollout.placed(self.recipe.env), 0)  # It learns from none.
            with closing(acting.build()) as env:
                for number in range(done or 0, self.rounds.rounds):
                    metrics = self._round(number, env)
                    logger.log(number + 1, metrics)
                    self.save(number + 1)
                    self.show(_line(number + 1, self.rounds.rounds, metrics))
        self.policy().save(self.run.policy)
        return metrics

    def _round(self, number: int, env: VecEnv) -> dict[str, float]:
        """Collect a round's episodes, unless they lie there already, and learn. Metrics are of how they ended."""
        if self.replay.has(number):
            fresh = self.replay.load(number)
        else:
            fresh = self._collect(number, env)
            notes = {SUCCEEDED: fresh.success.tolist()}
            if self.config.control == "shuffled_outcomes":
                fresh = fresh.with_shuffled_outcomes(derived_seed(self.recipe.seed, SHUFFLE, number))
            self.replay.add(number, fresh, notes)
        learner = self.learner_for(fresh)
        success = self.replay.notes[number][SUCCEEDED]
        fresh = replace(fresh, success=np.array(success, bool))
        metrics = {
            "rollout/success_rate": float(fresh.success.mean()),
            "rollout/episodes": float(self._num_episodes()),
            "replay/decisions": float(len(self.replay)),
            **fresh_figures([judged(learner, fresh, self.config.critic.discount)]),
        }
        return metrics | self.learn(self.rounds.updates_per_round)

    def _num_episodes(self) -> int:
        """Episodes of all rounds so far, without those that broke."""
        return sum(len(note[SUCCEEDED]) for note in self.replay.notes.values())

    def _collect(self, number: int, env: VecEnv) -> Transitions:
        """The decisions of a round's episodes, with the outcomes that these had."""
        count = self.rounds.episodes_per_round
        numbers = range(number * count, (number + 1) * count)
        policy = self.base if self.learner is None else self.policy()
        with episode_progress(count, f"round {number + 1}", transient=True) as on_episode:
            episodes = collect(
                policy,
                env,
                [spec_of(list(env.spec.tasks), self.rounds.start_index, n) for n in numbers],
                seed=[derived_seed(self.recipe.seed, COLLECT, n) for n in numbers],
                on_episode=on_episode,
            )
        with evaluation_mode(self.base):
            steered = self.noise_shape is not None and policy is not self.base
            return episode_transitions(self.base, episodes, self.draws(number + 1), steered)


def _line(number: int, rounds: int, metrics: dict[str, Any]) -> str:
    return (
        f"round {number} of {rounds}: {100 * metrics['rollout/success_rate']:.0f} % of episodes succeed, "
        f"{metrics['rollout/episodes']:.0f} so far; critic loss {metrics['critic/loss']:.3f}"
    )


def _start(recipe: OnlineRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
    improve_online(recipe, folder, show)
    return outcome(folder)


RUN = Run("train", ONLINE, _start, datasets=lambda _: ("sft.datasets",))
