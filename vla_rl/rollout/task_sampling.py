"""Task samplers: uniform, by estimated difficulty (VADE), or the worst axis (group DRO).

Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from vla_rl.config import Config, ConfigError
from vla_rl.data.keyframes import KeyframeSet
from vla_rl.rollout.success import count_informative
from vla_rl.types import Episode, EpisodeSpec

# Streams of the random generator: order of tasks, of states, Thompson draws, order of keyframes, of perturbations,
# draws of Group DRO.
_TASKS, _STATES, _THOMPSON, _KEYFRAMES, _PERTURBATIONS, _WORST = 1, 2, 3, 4, 5, 6
CLEAN = "clean"
VADE_PRIOR = 1.0  # Both parameters of the Beta prior: every rate is as likely.
# What is kept of the evidence on what was just rolled out, which the policy has outgrown; and on all else, so that what
# was found solved or hopeless is tried again.
VADE_DECAY, VADE_IDLE_DECAY = 0.8, 0.95
DRO_STEP = 0.5  # Step size of the weights' exponential update.
DRO_FLOOR = 0.2  # Share of the groups that is spread evenly, so that all are seen.

Arm = tuple[str, int | None]


class PerturbedTrainingConfig(Config):
    """Train episodes that differ from the usual ones; each group shares its perturbation."""

    axes: tuple[str, ...] = Field(
        min_length=1, description=f"Axes of docs/robustness.md, one for each group; {CLEAN}: a usual episode."
    )
    levels: tuple[Literal[1, 2, 3], ...] = Field(
        default=(1, 2, 3), min_length=1, description="Levels, one for each group, all equally often."
    )

    @field_validator("axes", "levels")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each once")
        return value


class SamplingConfig(Config):
    """How initial states of the train split are chosen."""

    kind: Literal["uniform", "vade", "group_dro"] = Field(
        default="uniform",
        description="uniform: every task equally often; vade: most often those solved half of the time; group_dro: "
        "most often those tasks, and axes of perturb, that fail most (Group DRO).",
    )
    perturb: PerturbedTrainingConfig | None = Field(
        default=None, description="Perturb train episodes, {axes: [camera, light], levels: [1, 2]}; null: not."
    )
    level: Literal["task", "state"] = Field(
        default="task", description="vade: estimate difficulty per task, or per initial state (needs train_states)."
    )
    train_states: PositiveInt | None = Field(
        default=None,
        description="Distinct initial states per task, revisited in shuffled order; null: a fresh one every time.",
    )
    first_state: NonNegativeInt = Field(default=0, description="Index of the first initial state in the train split.")
    keyframe_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the groups that begin at keyframes, not at initial states."
    )
    keyframes: Path | None = Field(
        default=None, description="Those keyframes, as `vla-rl world-model keyframes` writes them; `loop` fills it in."
    )

    def build(self, tasks: Sequence[str], seed: int = 0, imagined: bool = False) -> TaskSampler:
        """Make the sampler of these tasks; of `imagined` episodes keyframes are moments of recorded ones.

        A ConfigError or KeyframeError: keyframes are asked for, and missing, damaged or not of these tasks.
        """
        samplers = {"vade": VadeSampler, "group_dro": GroupDroSampler, "uniform": TaskSampler}
        return samplers[self.kind](self, list(tasks), seed, self._mined(tasks, imagined) if self.keyframe_share else ())

    def check_keyframes(self) -> None:
        """
        Raises:
            ConfigError: groups are to begin at keyframes, and there are none.
        """
        if self.keyframes is None:
            raise ConfigError(
                f"sampling.keyframes: is null, but sampling.keyframe_share is {self.keyframe_share:g}; name the file "
                "that `vla-rl world-model keyframes` wrote, or set sampling.keyframe_share=0"
            )
        if not self.keyframes.is_file():
            raise ConfigError(
                f"sampling.keyframes: no file {self.keyframes}; `vla-rl world-model keyframes` writes one"
            )

    def _mined(self, tasks: Sequence[str], imagined: bool) -> list[EpisodeSpec]:
        """Return the episodes that begin at keyframes."""
        self.check_keyframes()
        assert self.keyframes is not None, "checked"
        mined = KeyframeSet.load(self.keyframes).of_tasks(tasks)
        of = mined.recorded if imagined else mined.simulated
        return [of(number) for number in range(len(mined.keyframes))]


@dataclass(eq=False)
class TaskSampler:
    """Draws initial states of the train split, one for each group of episodes: every task equally often.

    The same config, tasks, seed, and history of `draw` and `update` give the same draws.

    Args:
        keyframes: episodes that begin at keyframes; `keyframe_share` of the groups are of these, which come in a new
            random order each time all have come.
    """

    config: SamplingConfig
    tasks: list[str]
    seed: int = 0
    keyframes: Sequence[EpisodeSpec] = ()
    _num_groups = _num_keyframes = _num_drawn = _num_perturbed = 0

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks: got {self.tasks}, need at least one, each once")
        self._num_of_task = dict.fromkeys(self.tasks, 0)

    def draw(self, num_groups: int) -> list[EpisodeSpec]:
        """Return one spec for each group, split "train"; those at keyframes last."""
        at_keyframes = self._num_at_keyframes(num_groups) if self.keyframes else 0
        self._num_groups += num_groups
        states = self._draw_states(num_groups - at_keyframes)
        if self.config.perturb is not None:
            states = [self._perturbed(spec, self.config.perturb.axes) for spec in states]
        return states + [self._next_keyframe() for _ in range(at_keyframes)]

    def _num_at_keyframes(self, num_groups: int) -> int:
        """Return how many of the next groups begin at keyframes: of all so far, `keyframe_share`."""
        before, after = (int(self.config.keyframe_share * n) for n in (self._num_groups, self._num_groups + num_groups))
        return after - before

    def update(self, episodes: Sequence[Episode]) -> None:
        """Learn from the outcomes of episodes drawn here; the uniform sampler has nothing to learn."""

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return what a run logs of a rollout: success along each axis of `perturb`."""
        success: defaultdict[str, list[bool]] = defaultdict(list)
        for episode in episodes:
            if self.config.perturb is not None and episode.spec.perturbation is not None and not episode.lost:
                success[_axis(episode.spec)].append(episode.success)
        return {f"train/success/{axis}": fmean(success[axis]) for axis in sorted(success)}

    def _perturbed(self, spec: EpisodeSpec, axes: tuple[str, ...]) -> EpisodeSpec:
        """Return the spec with the next perturbation: all axes in a new random order each time all have come."""
        if spec.perturbation is not None:
            return spec
        return self._along(spec, axes[self._shuffled(self._num_perturbed, len(axes), _PERTURBATIONS)])

    def _along(self, spec: EpisodeSpec, axis: str) -> EpisodeSpec:
        """Return the spec perturbed along this axis, at a level drawn."""
        assert self.config.perturb is not None, "axes are those of sampling.perturb"
        generator = np.random.default_rng([self.seed, _PERTURBATIONS, 0, self._num_perturbed])
        level = generator.choice(self.config.perturb.levels)
        self._num_perturbed += 1
        return replace(spec, perturbation=CLEAN if axis == CLEAN else f"{axis}-{level}")

    def _next_keyframe(self) -> EpisodeSpec:
        place = self._shuffled(self._num_keyframes, len(self.keyframes), _KEYFRAMES)
        self._num_keyframes += 1
        return self.keyframes[place]

    def _draw_states(self, num_groups: int) -> list[EpisodeSpec]:
        numbers = range(self._num_drawn, self._num_drawn + num_groups)
        tasks = [self.tasks[self._shuffled(number, len(self.tasks), _TASKS)] for number in numbers]
        return [self._spec_of_task(task) for task in tasks]

    def _spec_of_task(self, task: str) -> EpisodeSpec:
        """Return the task's next initial state."""
        number, num_states = self._num_of_task[task], self.config.train_states
        self._num_of_task[task] += 1
        self._num_drawn += 1
        if num_states is not None:
            number = self._shuffled(number, num_states, _STATES, self.tasks.index(task))
        return EpisodeSpec(task, "train", self.config.first_state + number)

    def _shuffled(self, number: int, size: int, *stream: int) -> int:
        """Return which of `size` things is drawn after `number`: in a new random order each time all have come."""
        lap, place = divmod(number, size)
        return int(np.random.default_rng([self.seed, *stream, lap]).permutation(size)[place])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, JSON-able."""
        return {
            "tasks": self.tasks,
            "num_drawn": self._num_drawn,
            "num_groups": self._num_groups,
            "num_keyframes": self._num_keyframes,
            "num_of_task": dict(self._num_of_task),
            "num_perturbed": self._num_perturbed,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo `state`.

        Raises:
            ValueError: the checkpoint is of other tasks or states.
        """
        if list(state["tasks"]) != self.tasks:
            raise ValueError(
                f"sampling: the checkpoint is of tasks {list(state['tasks'])}, this run has {self.tasks}; resume with "
                "the same env.tasks."
            )
        self._num_drawn = int(state["num_drawn"])
        self._num_groups, self._num_keyframes = int(state["num_groups"]), int(state["num_keyframes"])
        self._num_of_task = {task: int(n) for task, n in state["num_of_task"].items()}
        self._num_perturbed = int(state["num_perturbed"])


def _axis(spec: EpisodeSpec) -> str:
    return (spec.perturbation or "").rpartition("-")[0] or CLEAN


class VadeSampler(TaskSampler):
    """Draws those tasks, or initial states, most often that are solved half of the time.

    VADE (Hu et al. 2025, arXiv 2511.18902): Thompson sampling of the most informative arm. For each group, a success
    rate p is drawn from every arm's Beta posterior, and the arm with the largest p (1 - p), the variance of its
    outcome, is taken. Our decay of evidence, one factor for what was rolled out and one for the rest, follows the
    paper's two-scale prior decay in purpose, not in formula.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        config, states = self.config, list[int | None]([None])
        if config.level == "state":
            assert config.train_states is not None, "sampling.level=state needs train_states"
            states = [config.first_state + i for i in range(config.train_states)]
        self._arms: list[Arm] = [(task, state) for task in self.tasks for state in states]
        self._number = {arm: i for i, arm in enumerate(self._arms)}
        # Evidence beyond the prior: (decayed) numbers of successes and failures.
        self._successes = np.zeros(len(self._arms))
        self._failures = np.zeros(len(self._arms))

    def update(self, episodes: Sequence[Episode]) -> None:
        """Learn from the outcomes of episodes drawn here. Lost ones, and those from keyframes, count for nothing."""
        new = np.zeros((2, len(self._arms)))
        for episode in episodes:
            spec = episode.spec
            number = self._number.get((spec.task, None if self._arms[0][1] is None else spec.index))
            if number is not None and not episode.lost and spec.keyframe is None:
                new[0 if episode.success else 1, number] += 1
        keep = np.where(new.sum(0) > 0, VADE_DECAY, VADE_IDLE_DECAY)
        self._successes = self._successes * keep + new[0]
        self._failures = self._failures * keep + new[1]

    def _draw_states(self, num_groups: int) -> list[EpisodeSpec]:
        generator = np.random.default_rng([self.seed, _THOMPSON, self._num_drawn])
        free = np.ones(len(self._arms), bool)
        specs = []
        for _ in range(num_groups):
            rate = generator.beta(self._successes + VADE_PRIOR, self._failures + VADE_PRIOR)
            number = int(np.argmax(np.where(free, rate * (1 - rate), -1.0)))
            task, index = self._arms[number]
            if index is None:
                specs.append(self._spec_of_task(task))
                continue
            free[number] = False  # A state comes once per draw, until all have come.
            if not free.any():
                free[:] = True
            self._num_drawn += 1
            specs.append(EpisodeSpec(task, "train", index))
        return specs

    def state(self) -> dict[str, Any]:
        return super().state() | {"successes": self._successes.tolist(), "failures": self._failures.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        found = len(state.get("successes", ()))
        if found != len(self._arms):
            raise ValueError(
                f"sampling: the checkpoint has {found} estimates of difficulty, this run has {len(self._arms)}; resume "
                "with the same sampling.kind, level and train_states."
            )
        super().load_state(state)
        self._successes = np.array(state["successes"], np.float64)
        self._failures = np.array(state["failures"], np.float64)


class GroupDroSampler(TaskSampler):
    """Draws those cells, tasks by axes of `perturb`, most often that fail most.

    Group DRO (Sagawa et al. 2020, arXiv 1911.08731, algorithm 1) with the weights as probabilities of being drawn:
    after each rollout the weight of each cell is multiplied by exp(DRO_STEP * loss), and all are normalized. The loss
    is one minus the cell's success rate, of the last rollout that had the cell; before the first, 1. Unlike in the
    paper, a cell that was not drawn is updated too, by what is last known of it, and DRO_FLOOR of the draws are even.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.config.perturb.axes if self.config.perturb else (CLEAN,)
        self._cells = [(task, axis) for task in self.tasks for axis in axes]
        self._weights = np.full(len(self._cells), 1 / len(self._cells))
        self._losses = np.ones(len(self._cells))

    @property
    def probabilities(self) -> np.ndarray:
        """Of each cell to be drawn, float64 (cells,): tasks in order, within each the axes."""
        return (1 - DRO_FLOOR) * self._weights + DRO_FLOOR / len(self._cells)

    def update(self, episodes: Sequence[Episode]) -> None:
        """Learn from the outcomes of episodes drawn here. Lost ones, and those from keyframes, count for nothing."""
        outcomes = defaultdict(list)
        for episode in episodes:
            if not episode.lost and episode.spec.keyframe is None:
                outcomes[episode.spec.task, _axis(episode.spec)].append(episode.success)
        for number, cell in enumerate(self._cells):
            if outcomes[cell]:
                self._losses[number] = 1 - np.mean(outcomes[cell])
        weights = self._weights * np.exp(DRO_STEP * self._losses)
        self._weights = weights / weights.sum()

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return what a run logs: also each cell's probability of being drawn next."""
        names = [task if self.config.perturb is None else f"{task}/{axis}" for task, axis in self._cells]
        drawn = zip(names, self.probabilities.tolist(), strict=True)
        return super().metrics(episodes) | {f"sampling/{name}": share for name, share in drawn}

    def _draw_states(self, num_groups: int) -> list[EpisodeSpec]:
        generator = np.random.default_rng([self.seed, _WORST, self._num_drawn])
        specs = []
        for number in generator.choice(len(self._cells), num_groups, p=self.probabilities):
            task, axis = self._cells[number]
            spec = self._spec_of_task(task)
            specs.append(spec if self.config.perturb is None else self._along(spec, axis))
        return specs

    def state(self) -> dict[str, Any]:
        return super().state() | {"weights": self._weights.tolist(), "losses": self._losses.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        found = len(state.get("weights", ()))
        if found != len(self._cells):
            raise ValueError(
                f"sampling: the checkpoint has {found} weights, this run has {len(self._cells)}; resume with the same "
                "sampling.kind and sampling.perturb."
            )
        super().load_state(state)
        self._weights = np.array(state["weights"], np.float64)
        self._losses = np.array(state["losses"], np.float64)


def groups_to_resample(episodes: Sequence[Episode], target: int, budget: int) -> int:
    """Dynamic sampling: return how many more groups to roll out, at most `budget`; 0 when done.

    Args:
        episodes: all of the rollout so far.
        target: groups wanted whose episodes were not all paid the same: with rewards of 0 and 1, neither all success
            nor all failure.
    """
    informative, _ = count_informative(episodes)
    return max(0, min(target - informative, budget))
