"""Plan of a recording: options of `collect`, and the episodes still to be run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, SerializeAsAny, model_validator

from vla_rl.config import Config, ConfigError, TaskNames, component
from vla_rl.interfaces import PlanningConfig
from vla_rl.types import EpisodeSpec

MAX_TRIES = 5  # With keep=successes a task is given up after this many times `episodes_per_task` episodes.
MAX_ATTEMPTS = 3  # Of one episode whose worker dies, before it is given up.


def _kept_by_default(values: dict[str, Any]) -> Literal["all", "successes"]:
    return "successes" if values.get("source") == "expert" else "all"


class CollectConfig(Config):
    """What to collect, and where to."""

    source: Literal["expert", "policy"] = Field(
        default="expert", description="Who acts: the scripted expert or the policy."
    )
    dataset: str = Field(
        default="data/demos", description="Folder of the LeRobotDataset v3 to write; must not exist yet."
    )
    imagined: bool = Field(
        default=False,
        description="Collect in the recipe's world model; each step is marked as imagined. With keep=successes: what "
        "filtered behavior cloning learns from.",
    )
    episodes_per_task: PositiveInt = Field(default=100, description="Episodes kept for each task.")
    tasks: TaskNames = Field(default=(), description="Tasks to collect; empty means all of the environment's.")
    split: Literal["train", "validation"] = Field(
        default="train", description="Which initial states; those of eval are for the final claim, not to learn from."
    )
    group_size: PositiveInt = Field(
        default=1,
        description="With source=policy: episodes from each initial state, one after another. From 2 on, trust can "
        "tell whether imagination orders the episodes of a state as reality does, which is what GRPO learns from.",
    )
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split.")
    keep: Literal["all", "successes"] = Field(
        default_factory=_kept_by_default,
        description="Keep every episode, or those that succeed; if not given, the expert's successes, and all of a "
        "policy's. A world model learns from failures too: all.",
    )
    noise: NonNegativeFloat = Field(
        default=0.0,
        description="Standard deviation of Gaussian noise on the translation (first three dimensions) of the executed "
        "expert action, in action units; the recorded label is the clean action (DART, arXiv 1703.09327).",
    )
    noise_hold: PositiveInt = Field(default=1, description="Control steps for which each noise sample is held.")
    temperature: NonNegativeFloat = Field(default=1.0, description="Of the policy's sampling; 0 is greedy.")
    every_frame: bool = Field(
        default=True,
        description="With source=policy: draw and record what is seen after each control step. false: only what the "
        "policy sees, once per chunk, which is several times as fast where rendering is slow, and all that a world "
        "model with frames as long as the policy's chunks learns from.",
    )
    keyframes: bool = Field(
        default=False,
        description="Keep the simulator's state before each action chunk, so that episodes can start there exactly.",
    )
    structure: bool = Field(
        default=False,
        description="Record what each pixel shows and how far away it is, which changes of style are guided by. Only "
        "for simulators that draw it: tabletop, libero, robosuite.",
    )
    objects: bool = Field(
        default=False,
        description="Record where the task's objects are at every control step (docs/world_model.md), for fitting and "
        "measuring a world model's objects; no policy reads it. Only for simulators that tell: tabletop, "
        "libero, robosuite.",
    )
    plan: Annotated[SerializeAsAny[PlanningConfig] | None, component("plan")] = Field(
        default=None,
        description="With source=policy: it plans with a world model as in eval.plan, {world_model: FOLDER, bonus: 1}; "
        "a bonus sends it where the world model is unsure. null: the policy's own actions.",
    )
    shard_episodes: PositiveInt = Field(default=64, description="Episodes per shard: what a kill can lose.")

    @model_validator(mode="after")
    def _check(self) -> CollectConfig:
        if self.imagined and (self.source != "policy" or self.keyframes or self.structure or self.objects):
            raise ConfigError(
                "collect.imagined: only for collect.source=policy, and without collect.keyframes, collect.structure "
                "and collect.objects"
            )
        if self.plan is not None and (self.source != "policy" or self.imagined):
            raise ConfigError(
                "collect.plan: only for real episodes of the policy; set collect.source=policy, or leave it out"
            )
        if self.plan is not None and self.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"collect.temperature: got {self.temperature:g} with collect.plan, which draws its candidates at "
                "collect.plan.temperature; set that one, or 0 here for a greedy candidate among them"
            )
        if not self.every_frame and (self.source != "policy" or self.structure):
            raise ConfigError(
                "collect.every_frame: false is only for collect.source=policy, and without collect.structure; the "
                "expert looks after each step"
            )
        if self.group_size > 1 and self.source != "policy":
            raise ConfigError(
                f"collect.group_size: got {self.group_size} with collect.source=expert, which does the same from the "
                "same state; set collect.group_size=1, or collect.source=policy"
            )
        if self.group_size > 1 and self.keyframes:
            raise ConfigError(
                f"collect.keyframes: got true with collect.group_size={self.group_size}; saved states go by their "
                "episode's initial state, so those of one episode would stand for all of its group. Set "
                "collect.group_size=1"
            )
        if self.source == "policy" and self.noise:
            raise ConfigError("collect.noise: only for collect.source=expert; use collect.temperature for a policy")
        return self


class RecordingPlan:
    """Initial states to record next, one task after another, and their outcomes.

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
            most = MAX_TRIES * config.episodes_per_task
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
