"""Pipelined rollouts in two halves: one half of the environments steps while the policy acts for the other.

from vla_rl.rollout.halves import HalvesRunner
HalvesRunner(env, specs, act, on_step, policy).run()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vla_rl.interfaces import HalvedEnv
from vla_rl.rollout.runner import Acted, EpisodeRunner, RunningEpisode, evaluation_mode
from vla_rl.types import StepResult


@dataclass
class _UnderWay[A: Acted]:
    """A half's step that has begun, and what waits for its result."""

    episodes: list[RunningEpisode]
    acted: A
    wait: Callable[[], StepResult]


class HalvesRunner[A: Acted](EpisodeRunner[A]):
    """An `EpisodeRunner` that does by turns, for the lower and the upper half of the environments: take the results of
    its last step, start what is to start, act, and begin the next step.

    So a policy's batch is half as large, and its calls come in the order of the environments within each turn, as the
    rows of one large batch do. `before_step` is called with a half's episodes. Of the stopwatch, "simulation" is
    what is waited for.

    An exception, Ctrl-C too, leaves steps under way; the environments' next reset gives them up.
    """

    def run(self) -> None:
        """Run until every episode has ended and there is nothing more to run."""
        assert isinstance(self.env, HalvedEnv), "collect asks"
        specs = ((number, spec, 1) for number, spec in enumerate(self.specs))
        middle = (self.env.num_envs + 1) // 2
        halves = (range(middle), range(middle, self.env.num_envs))
        held = [len(half) for half in halves]  # Episodes when specs were last asked for; fewer: some have ended.
        under_way: list[_UnderWay[A] | None] = [None, None]
        with evaluation_mode(self.policy):
            while any(under_way) or any(held):
                for number, half in enumerate(halves):
                    self._finish(under_way[number])
                    if self._num_running(half) < held[number]:
                        self._start(specs, half)
                    held[number] = self._num_running(half)
                    under_way[number] = self._begin(half)

    def _num_running(self, half: range) -> int:
        return sum(env_id in self._running for env_id in half)

    def _begin(self, half: range) -> _UnderWay[A] | None:
        """Act for the half's episodes and begin their step; None where none is left."""
        assert isinstance(self.env, HalvedEnv), "collect asks"
        episodes = self._going_on([self._running[i] for i in half if i in self._running])
        if not episodes:
            return None
        with self.stopwatch.measure("inference"):
            acted = self.act(episodes)
        return _UnderWay(episodes, acted, self.env.begin_step(acted.actions, [episode.env_id for episode in episodes]))

    def _finish(self, step: _UnderWay[A] | None) -> None:
        """Wait for a step and take its results."""
        if step is None:
            return
        with self.stopwatch.measure("simulation"):
            results = step.wait()
        self._take(step.episodes, step.acted, results)
