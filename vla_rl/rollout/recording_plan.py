"""Which episodes a dataset still lacks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from vla_rl.recipe.collect_config import CollectConfig
from vla_rl.types import EpisodeSpec

MAX_ATTEMPTS = 3  # Of one episode whose worker dies, before it is given up.


class RecordingPlan:
    """Which initial states to run next, one task after another, and what came of them.

    Attributes:
        kept, successes, running: task -> episodes. lost: those that broke in every try.
        tried: task -> how often each initial state, by its index, was started so far.
    """

    def __init__(self, config: CollectConfig, tasks: Sequence[str]) -> None:
        self.config, self.tasks = config, list(tasks)
        self.kept = dict.fromkeys(self.tasks, 0)
        self.successes = dict.fromkeys(self.tasks, 0)
        self.tried: dict[str, Counter[int]] = {task: Counter() for task in self.tasks}
        self.running = dict.fromkeys(self.tasks, 0)
        self.lost = dict.fromkeys(self.tasks, 0)

    @property
    def wanted(self) -> int:
        """Episodes to keep, of all tasks."""
        return self.config.episodes_per_task * len(self.tasks)

    def specs(self) -> Iterator[EpisodeSpec | None]:
        """Without end: the next episode to start, or None while none is needed."""
        while True:
            yield self._next()

    def _next(self) -> EpisodeSpec | None:
        for task in self.tasks:
            if (index := self._next_index(task)) is not None:
                self.tried[task][index] += 1
                self.running[task] += 1
                return EpisodeSpec(task, self.config.split, index)
        return None

    def _next_index(self, task: str) -> int | None:
        config, tried = self.config, self.tried[task]
        need = config.episodes_per_task - self.kept[task]
        if config.keep == "all":
            most = config.episodes_per_task
        else:
            if need <= self.running[task]:  # Enough are under way, should all succeed.
                return None
            most = config.max_attempts * config.episodes_per_task
        if tried.total() >= most:
            return None
        stop = config.start_index - (-most // config.group_size)
        return next((i for i in range(config.start_index, stop) if tried[i] < config.group_size), None)

    def finish(self, spec: EpisodeSpec, success: bool) -> bool:
        """Note an episode's end; returns whether it is kept."""
        self.running[spec.task] -= 1
        self.successes[spec.task] += success
        keep = (success or self.config.keep == "all") and self.kept[spec.task] < self.config.episodes_per_task
        self.kept[spec.task] += keep
        return keep

    def give_up(self, spec: EpisodeSpec) -> None:
        """Note an episode that broke `MAX_ATTEMPTS` times."""
        self.running[spec.task] -= 1
        self.lost[spec.task] += 1
        warnings.warn(f"{spec.task} {spec.split} {spec.index}: broke {MAX_ATTEMPTS} times; given up", stacklevel=2)

    def restore(self, rows: Sequence[dict[str, Any]], rejected: Sequence[tuple[str, int]]) -> None:
        """Take over what an earlier, killed collection has finished."""
        for row in rows:
            self.tried[row["task"]][row["index"]] += 1
            self.kept[row["task"]] += 1
            self.successes[row["task"]] += row["success"]
        for task, index in rejected:
            self.tried[task][index] += 1
