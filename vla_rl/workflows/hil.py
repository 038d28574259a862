"""`run: hil`: a frozen policy improved while it acts with a person beside it (HIL-SERL, arXiv 2410.21845).

Two processes. The actor (`hil_actor`, or on a robot `vla-rl deploy --record`) runs episodes and records them, with who
drove at each step. The learner, here, takes each finished episode up once, learns all the while, and publishes
policies, of which the actor takes the newest between episodes. All that they tell each other lies in folders and
appears whole: after a kill of either, the same command goes on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.operator.recording_folder import finish
from vla_rl.algorithms.offpolicy.published import PublishedError, newest, publish
from vla_rl.algorithms.offpolicy.recorded import (
    RecordedFrames,
    new_episodes,
    num_recorded,
    recorded_transitions,
    recordings_in,
)
from vla_rl.algorithms.offpolicy.value_guided_config import ValueGuidedConfig
from vla_rl.common.child_process import end_child, start_child
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.verdict import outcome
from vla_rl.recipe.checks import HIL
from vla_rl.recipe.recipe import Run, check
from vla_rl.recipe.runs import HilRecipe
from vla_rl.rewards.base import judge_episodes, judged_steps
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.types import Observation
from vla_rl.workflows.hil_actor import PUBLISHED, RECORDING
from vla_rl.workflows.offline import BASE, FINAL, collect_missing, evaluate_once, resumed_logger
from vla_rl.workflows.recipe_parts import build_policy, env_spec, limit_threads
from vla_rl.workflows.replay_learning import SHUFFLE, Judged, ReplayLearning, fresh_figures, judged

LOOK_SECONDS = 0.5  # From one look for new episodes to the next, where nothing is to be learned.
AT_ONCE = 100  # Updates from one look for new episodes to the next.
TOGETHER = 20  # Episodes taken up together, at most.
ACTOR_LOG = "actor.log"
_KEEP_PUBLISHED = 3  # Policies for the actor, the newest ones.
COUNTS = ("episodes", "successes", "alone", "interventions", "resets", "person_minutes")


class ActorError(RuntimeError):
    """The actor's process has ended before its episodes were run."""


def run_hil(recipe: HilRecipe, folder: Path, show: Callable[[str], None]) -> dict[str, float]:
    """Learn from episodes with a person, and evaluate before and after; resumes where it stopped.

    Returns:
        The last metrics.

    Raises:
        ConfigError: the recipe lacks a section, or its policy is no checkpoint.
        DatasetError: a dataset is not there, or an episode is damaged. ReplayError: the buffer is damaged, or another
            policy's. ActorError: the actor has ended.
    """
    check(recipe, HIL)
    limit_threads(recipe)
    if recipe.hil.reads_datasets:
        collect_missing(recipe, show)
    if recipe.hil.evaluate == "before_and_after":
        evaluate_once(recipe, folder, BASE)
    metrics = _Learner(recipe, folder, show).finish()
    if recipe.hil.evaluate != "never":
        improved = recipe.model_copy(update={"policy": ValueGuidedConfig(path=str(RunFolder(folder).policy))})
        evaluate_once(improved, folder, FINAL)
    write_report(folder)
    return metrics


class _Learner(ReplayLearning):
    """The learner of one run. How much of each recording was taken up is known from the replay's own segments."""

    needs_failures = False  # Fresh episodes have some.

    def __init__(self, recipe: HilRecipe, folder: Path, show: Callable[[str], None]) -> None:
        self.hil, spec = recipe.hil, env_spec(recipe)
        base = build_policy(recipe, spec)
        super().__init__(recipe, recipe.hil, folder, show, base, person_is_prior=True)
        reward = getattr(recipe.env, "reward", None)
        robot = self.hil.actor == "recordings"
        self._reward = reward.build(spec) if robot and reward is not None else None
        self._replaced: set[str] = set()  # Recordings of which this was told.
        self._judged: list[Judged] = []  # Since the last metrics, as are these:
        self._found: list[dict[str, float]] = []
        self._before = dict.fromkeys(COUNTS, 0.0)

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return 0 if self.learner is None else self.learner.num_updates

    def total(self, name: str) -> float:
        """One of `COUNTS`, over all episodes that were taken up."""
        return sum(note[name] for note in self.replay.notes.values())

    def finish(self) -> dict[str, float]:
        """Learn until all episodes have been learned from, and save the policy."""
        done = self.resume()
        self.replay.restore()
        self._before |= self.more.get("counts", {})
        metrics: dict[str, float] = {}
        with resumed_logger(self.recipe, self.run.path) as logger:
            if done is None:
                self.warm_up()
                if self.learner is None and self.replay.oldest is not None:  # Killed before its first checkpoint.
                    self.learner_for(self.replay.oldest)
            self._publish()
            with self._actor() as actor:
                while not self._is_over(actor):
                    if self._is_due():
                        metrics = self._metrics()
                        logger.log(self.num_updates, metrics)
                        self._publish()
            if self._found or not metrics:
                metrics = self._metrics()
                logger.log(self.num_updates, metrics)
                self._publish()
        self._current().save(self.run.policy)
        if self.hil.actor == "simulator" and not (self.run.path / RECORDING).is_dir():
            finish(self.run.path / RECORDING)
        return metrics

    def _is_over(self, actor: subprocess.Popen[bytes] | None) -> bool:
        """Take up what is new, and learn for a while; whether there is nothing left to do, nor will be."""
        code = None if actor is None else actor.poll()  # Before the look: what is new then is all there is.
        ended = code is not None
        if code:
            log = self.run.path / ACTOR_LOG
            raise ActorError(
                f"the actor has ended ({code}): {log.read_text(errors='replace')[-1500:]}\n"
                f"Finished episodes are kept; the same command goes on with --resume --output {self.run.path}"
            )
        last = ended or (actor is None and self.total("episodes") >= self.hil.episodes)
        took = self._take_up(all_of_it=last)
        owed = self._owed()
        if owed > 0:
            self._found.append({"updates": min(AT_ONCE, owed)} | self.learn(min(AT_ONCE, owed)))
        elif not took and not last:
            time.sleep(LOOK_SECONDS)
        return last and not took and owed <= 0

    def _owed(self) -> int:
        """Updates that the episodes so far have paid for, and that were not made."""
        if self.learner is None:
            return 0
        warm = self.hil.warm_updates if self.logged is not None else 0
        return warm + int(self.total("episodes")) * self.hil.updates_per_episode - self.num_updates

    def _is_due(self) -> bool:
        """Whether enough was learned for another policy: by updates, since a resumed learner may owe many at once."""
        updates = sum(found["updates"] for found in self._found)
        return updates >= self.hil.publish_every * self.hil.updates_per_episode

    # --- episodes --------------------------------------------------------------------------------

    @contextmanager
    def _actor(self) -> Iterator[subprocess.Popen[bytes] | None]:
        """The actor's process, where it is one of ours; it ends with this one, however that ends."""
        if self.hil.actor != "simulator":
            self.show(f"waiting for recordings in {self.hil.recordings}; policies are in {self.run.path / PUBLISHED}")
            yield None
            return
        command = [sys.executable, "-m", "vla_rl.workflows.hil_actor", str(self.run.path)]
        with (self.run.path / ACTOR_LOG).open("ab") as log:
            process = start_child(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            end_child(process, seconds=10)

    def _recordings(self) -> list[Path]:
        """The recordings to take episodes from, under way or finished."""
        if self.hil.actor == "simulator":
            return [self.run.path / RECORDING]
        return recordings_in(Path(self.hil.recordings))

    def _taken(self, recording: str) -> int:
        """How many of a recording's episodes were taken up."""
        return sum(note["recordings"].get(recording, 0) for note in self.replay.notes.values())

    def _new(self) -> dict[Path, int]:
        """The recordings that have episodes which were not taken up, and how many."""
        found = {}
        for recording in self._recordings():
            taken, count = self._taken(recording.name), num_recorded(recording)
            if count < taken and recording.name not in self._replaced:
                self._replaced.add(recording.name)
                self.show(
                    f"{recording}: holds {count} episodes, and {taken} of this name were taken up before; its first "
                    f"{taken} are not learned from. Record into a folder of another name"
                )
            if count > taken:
                found[recording] = count - taken
        return found

    def _take_up(self, all_of_it: bool) -> bool:
        """Learn from new episodes from now on: a segment of the replay, which says which they were."""
        new = self._new()
        if not new or not (all_of_it or sum(new.values()) >= self._least()):
            return False
        found: dict[str, list[RecordedFrames]] = {}
        for recording, count in new.items():
            most = min(count, TOGETHER - sum(len(episodes) for episodes in found.values()))
            if most:
                found[recording.name] = new_episodes(recording, self._taken(recording.name), self.base.cameras, most)
        self._add(found)
        return True

    def _least(self) -> int:
        """Episodes to take up together, at least: those that the critic normalizes by, or with shuffled outcomes."""
        several = TOGETHER if self.config.control == "shuffled_outcomes" else 1
        if self.learner is None:
            several = max(several, min(TOGETHER, self.hil.publish_every))
        return min(several, self.hil.episodes - int(self.total("episodes")))

    def _add(self, found: Mapping[str, list[RecordedFrames]]) -> None:
        """Add a segment of these episodes, by recording."""
        episodes = [episode for own in found.values() for episode in own]
        if self._reward is not None:
            episodes = [_labeled(self._reward, episode) for episode in episodes]
        number = max(self.replay.notes, default=-1) + 1
        with evaluation_mode(self.base):
            fresh = recorded_transitions(self.base, episodes, self.draws(number + 1))
        if self.learner is not None:
            self._judged.append(judged(self.learner, fresh, self.config.critic.discount))
        if self.config.control == "shuffled_outcomes":
            fresh = fresh.with_shuffled_outcomes(derived_seed(self.recipe.seed, SHUFFLE, number))
        alone = [episode.success and not episode.interventions for episode in episodes]
        driven = sum(int(episode.person.sum()) / episode.rate for episode in episodes)  # Seconds.
        notes = {
            "recordings": {name: len(own) for name, own in found.items()},
            "episodes": len(episodes),
            "successes": sum(episode.success for episode in episodes),
            "alone": int(np.sum(alone)),
            "interventions": sum(episode.interventions for episode in episodes),
            "resets": sum(not episode.continued for episode in episodes),
            "person_minutes": driven / 60,
        }
        self.replay.add(number, fresh, notes)
        self.learner_for(fresh)

    # --- what is published -----------------------------------------------------------------------

    def _current(self) -> Any:
        """The policy as it is improved so far; the base before anything was learned."""
        return self.policy() if self.num_updates else self.base

    def _publish(self) -> None:
        """Save the learner, then publish its policy, unless it is the newest already."""
        if self.learner is not None:
            self.save(self.num_updates, {"counts": self._before})
        folder = self.run.path / PUBLISHED
        try:
            before = newest(folder)
        except PublishedError as error:
            self.show(f"{error}; published anew")
            before = None
        if before is None or before.number != self.num_updates:
            publish(folder, self.num_updates, self._current(), _KEEP_PUBLISHED)

    def _metrics(self) -> dict[str, float]:
        """What was counted and learned since this was last asked."""
        totals = {name: float(self.total(name)) for name in COUNTS}
        new = {name: totals[name] - self._before[name] for name in COUNTS}
        names = {name for found in self._found for name in found if name != "updates"}
        learned = {name: float(np.mean([f[name] for f in self._found if name in f])) for name in names}
        found = {
            "rollout/episodes": totals["episodes"],
            "person/interventions": totals["interventions"],
            "person/resets": totals["resets"],
            "person/minutes": totals["person_minutes"],
            "replay/decisions": float(len(self.replay)),
            "replay/prior_decisions": float(self.replay.num_prior),
            **_rates(new),
            **fresh_figures(self._judged),
            **learned,
        }
        self._before, self._judged, self._found = totals, [], []
        self.show(_line(found))
        return found


def _labeled(reward: Any, episode: RecordedFrames) -> RecordedFrames:
    """The episode with success as a reward says: whether it counts as one anywhere but where it begins.

    The reward is asked as often as it was fitted to be, and of what was seen last.
    """
    seen = episode.obs if episode.final is None else Observation.concatenate([episode.obs, episode.final])
    [judgement] = judge_episodes(reward, [seen.select(judged_steps(seen.batch_size - 1, reward.every))])
    return replace(episode, success=bool(judgement.counts[1:].any()))


def _rates(new: Mapping[str, float]) -> dict[str, float]:
    """Of the episodes that are new, counted in `new`; none where there are none."""
    if not (of := new["episodes"]):
        return {}
    return {
        "rollout/success_rate": new["successes"] / of,
        "rollout/solved_alone": new["alone"] / of,
        "person/interventions_per_100": 100 * new["interventions"] / of,
        "person/minutes_per_100": 100 * new["person_minutes"] / of,
        "person/resets_per_100": 100 * new["resets"] / of,
    }


def _line(metrics: dict[str, Any]) -> str:
    if "rollout/solved_alone" not in metrics:
        return f"{metrics['rollout/episodes']:.0f} episodes; none is new, learning from them goes on"
    alone, interventions = 100 * metrics["rollout/solved_alone"], metrics["person/interventions_per_100"]
    return (
        f"{metrics['rollout/episodes']:.0f} episodes; of the last {alone:.0f} % solved alone; per 100 episodes "
        f"{interventions:.1f} interventions, {metrics['person/minutes_per_100']:.1f} person-minutes, "
        f"{metrics['person/resets_per_100']:.3g} resets"
    )


def _start(recipe: HilRecipe, folder: Path, _: bool, show: Callable[[str], None]) -> list[str]:
    run_hil(recipe, folder, show)
    return outcome(folder)


RUN = Run("train", HIL, _start, datasets=lambda _: ("sft.datasets",))
