"""The contract of rewards. Imports no torch.

model = recipe.env.reward.build(spec)
judgement = model.observe(obs, env_ids, begins)      # every `model.every` control steps, and where an episode ends
judgement.success, judgement.progress, judgement.counts
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import numpy as np

from vla_rl.config import Config
from vla_rl.types import EnvSpec, Observation, StepResult


@dataclass(frozen=True)
class Judgement:
    """What a reward says of B episodes at what they show now.

    Attributes:
        success: float32 (B,), in [0, 1], the probability that the task has been carried out: among episodes whose
            highest value is this, so many succeeded.
        progress: float32 (B,), in [0, 1], what share of the task's way is expected to lie behind: 1 at success, 0 for
            an episode that will fail; so it is low, too, where most episodes fail that look like this.
        counts: bool (B,), the episode counts as a success, by the reward's own threshold.
    """

    success: np.ndarray
    progress: np.ndarray
    counts: np.ndarray

    def select(self, rows: np.ndarray) -> Judgement:
        """That of the episodes at `rows`, in that order."""
        return Judgement(*(getattr(self, field.name)[rows] for field in fields(self)))


class RewardModel(Protocol):
    """A judge of episodes under way, several at a time. It remembers of each what it needs of what came before.

    Attributes:
        every: control steps from one judgement to the next, and an episode's end besides; None: any number of them.
    """

    every: int | None = None

    def watch(self, result: StepResult, streams: Sequence[int]) -> None:
        """Be told of a step of B episodes, before `observe` may be asked; most rewards take no notice."""

    @abstractmethod
    def observe(
        self,
        obs: Observation,
        streams: Sequence[int],
        begins: Sequence[bool] | np.ndarray,
        told: np.ndarray | None = None,
    ) -> Judgement:
        """Judge B episodes by what they show now.

        Args:
            obs: B observations: uint8 (B, height, width, 3) of each camera, state float32 (B, S), instructions.
            streams: B numbers, the same for an episode from its beginning to its end, such as the environment's.
            begins: bool (B,), a new episode begins in the stream with this observation.
            told: bool (B,), whether the task has been carried out as a simulator or a person knows; None: unknown. A
                learned reward takes no notice.

        Raises:
            ValueError: a camera is missing, a state of another size, or a stream that never began.
        """
        ...


class RewardConfig(Config):
    """Base of `env.reward`: where the reward that RL learns from comes from.

    Attributes:
        of_poses: it says by the simulator's own poses what the task is: these are told, and policies evaluated by it.
    """

    of_poses: ClassVar[bool] = False

    kind: str

    def build(self, spec: EnvSpec) -> RewardModel:
        """Return the reward, for an environment of this spec.

        Raises:
            ValueError: it is missing, damaged, or reads what the environment does not show.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build(spec) -> RewardModel")


class ToldReward(RewardModel):
    """What the simulator, or a person, says: probability and progress are 0 before success, and 1 from there on."""

    def observe(
        self,
        obs: Observation,
        streams: Sequence[int],
        begins: Sequence[bool] | np.ndarray,
        told: np.ndarray | None = None,
    ) -> Judgement:
        """See `RewardModel.observe`."""
        if told is None:
            raise ValueError("the simulator's reward needs to be told who has succeeded; nobody said so")
        value = np.asarray(told, np.float32)
        return Judgement(value, value.copy(), np.asarray(told, bool))


def judged_steps(length: int, every: int | None) -> np.ndarray:
    """Where an episode is judged, int64, ascending: control steps before; the first is 0, the last `length`, its end.

    Args:
        length: control steps of the episode. every: see `RewardModel`; None: at each.
    """
    every = every or 1
    return np.minimum(np.arange(0, length + every, every), length)


def judge_episodes(
    model: RewardModel, episodes: Sequence[Observation], told: Sequence[np.ndarray] | None = None
) -> list[Judgement]:
    """Judge whole episodes, each step by what was seen up to it.

    Args:
        episodes: of each, its T observations in order (T rows). told: bool (T,) of each; None: unknown.

    Returns:
        A judgement of T rows for each.
    """
    steps: list[list[Judgement]] = [[] for _ in episodes]
    for t in range(max((obs.batch_size for obs in episodes), default=0)):
        running = [i for i, obs in enumerate(episodes) if t < obs.batch_size]
        said = None if told is None else np.array([told[i][t] for i in running], bool)
        seen = Observation.concatenate([episodes[i].row(t) for i in running])
        judged = model.observe(seen, running, np.full(len(running), t == 0), said)
        for row, i in enumerate(running):
            steps[i].append(judged.select(np.array([row])))
    names = [field.name for field in fields(Judgement)]
    return [Judgement(*(np.concatenate([getattr(s, name) for s in own]) for name in names)) for own in steps]
