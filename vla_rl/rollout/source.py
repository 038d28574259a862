"""Episode sources: rollouts by this process, or by actors on many machines.

Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import SerializeAsAny

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.progress import Stopwatch
from vla_rl.config import Config, component
from vla_rl.interfaces import EnvConfig, Policy, VecEnv
from vla_rl.policies.base import PolicyConfig
from vla_rl.rollout.runner import collect
from vla_rl.types import EnvSpec, Episode, EpisodeSpec, Keyframe, Observation, StepResult


@dataclass(frozen=True)
class GroupOrder:
    """Groups of episodes that a rollout asks for.

    Attributes:
        specs: initial state of each group to begin.
        size: episodes of each group.
        seed: of the policy's sampling.
        first_group: number of the first group returned; the others follow.
        num_groups: groups to return: those of `specs`, or for a source that works ahead, those that are ready first.
    """

    specs: Sequence[EpisodeSpec]
    size: int
    seed: int
    first_group: int
    num_groups: int

    @property
    def episodes(self) -> list[EpisodeSpec]:
        """Those to begin, one group after another."""
        return [spec.member(number) for spec in self.specs for number in range(self.size)]


class EpisodeSource(Protocol):
    """Source of a run's episodes, in whole groups.

    Attributes:
        staleness: how many updates old the oldest chunk of a group may be; the source works so many rollouts ahead.
        num_under_way: groups begun and not yet returned.
        dashboard: address of a page of the machines at work; empty: there is none.
    """

    staleness: int
    dashboard: str

    @property
    def num_under_way(self) -> int: ...

    def publish(self, policy: Policy, version: int) -> None:
        """Let chunks be drawn by this policy from now on; `version`: updates that it has seen."""
        ...

    def collect(
        self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None] = lambda _: None
    ) -> list[Episode]:
        """Begin the order's groups; return `num_groups` finished ones, each in a row and whole.

        Args:
            stopwatch: counts "simulation" and "inference", where they are waited for.
            on_episode: called with each episode as it is known to have ended, for progress.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is logged of the last rollout besides its episodes, by name."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, JSON-able."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo `state`."""
        ...

    def close(self) -> None:
        """Release what the source started; not the environment it was given. May be called twice."""
        ...


def own_state(checkpoint: Mapping[str, Any], world: ProcessGroup, path: Path) -> Mapping[str, Any]:
    """What this process's source had under way, of a checkpoint that has the `sources` of all that trained together.

    Raises:
        ValueError: another number of processes trained then, and episodes were under way.
    """
    states = checkpoint["sources"]
    if len(states) == world.size:
        return states[world.rank]
    if any(state.get("groups") for state in states):
        raise ValueError(
            f"{path}: was saved by {len(states)} training processes with episodes under way (rollout.staleness above "
            f"0), now there are {world.size}; resume with {len(states)}"
        )
    return {}


class LaterEnv:
    """An environment that starts when it is first used, which may be never; its spec is known before."""

    def __init__(self, config: EnvConfig) -> None:
        self.spec: EnvSpec = config.env_spec()
        self.num_envs, self._config = config.num_envs, config
        self._env: VecEnv | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built(), name)

    def _built(self) -> VecEnv:
        if self._env is None:
            self._env = self._config.build()
        return self._env

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """See `VecEnv.reset`."""
        return self._built().reset(specs, env_ids)

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`."""
        return self._built().step(actions, env_ids)

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """See `VecEnv.save_state`."""
        return self._built().save_state(env_ids)

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `VecEnv.expert_action`."""
        return self._built().expert_action(env_ids)

    def close(self) -> None:
        """End it, where it has started."""
        if self._env is not None:
            self._env.close()


def with_steps_after_success(env_config: EnvConfig, steps: int) -> EnvConfig:
    """The same environment, whose episodes go on for so many control steps after success, where it has that option."""
    if isinstance(held := getattr(env_config, "env", None), EnvConfig):  # Held elsewhere, as by Ray's hosts.
        return env_config.model_copy(update={"env": with_steps_after_success(held, steps)})
    if "steps_after_success" not in type(env_config).model_fields:
        return env_config
    return env_config.model_copy(update={"steps_after_success": steps})


class RolloutConfig(Config, ABC):
    """Base of every rollout section: where a training run's episodes come from."""

    kind: str

    def build_env(self, env: EnvConfig) -> VecEnv:
        """Start the run's own environment; where only checks and evaluations may need it, not before they do."""
        return env.build()

    def placed(self, env: EnvConfig) -> EnvConfig:
        """An environment's section, built where this one says: here, in this process."""
        return env

    @abstractmethod
    def build(self, plan: RolloutPlan, env: VecEnv, world: ProcessGroup) -> EpisodeSource:
        """Start the source of this process.

        Args:
            plan: what rolls out, this section included. env: the run's environment, built.
            world: the processes that train together, each with a source of its own.
        """


class RolloutPlan(Config):
    """Plan of rollouts: all that a process elsewhere must know to run a recipe's episodes.

    Attributes:
        groups: initial states per iteration. temperature: of the policy's sampling.
    """

    env: Annotated[SerializeAsAny[EnvConfig], component("env")]
    policy: Annotated[SerializeAsAny[PolicyConfig], component("policy")]
    rollout: Annotated[SerializeAsAny[RolloutConfig], component("rollout")]
    groups: int
    temperature: float
    seed: int
    device: str


class LocalRolloutConfig(RolloutConfig):
    """Episodes run in the training process, one rollout at a time."""

    kind: Literal["local"] = "local"

    def build(self, plan: RolloutPlan, env: VecEnv, world: ProcessGroup) -> LocalSource:
        return LocalSource(env, plan.temperature)


@dataclass
class LocalSource:
    """Runs the episodes here, all of them by the policy as it is."""

    env: VecEnv
    temperature: float
    _policy: Policy | None = field(default=None, init=False)

    staleness = 0
    num_under_way = 0
    dashboard = ""

    def publish(self, policy: Policy, version: int) -> None:
        """See `EpisodeSource.publish`."""
        self._policy = policy

    def collect(
        self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None] = lambda _: None
    ) -> list[Episode]:
        """See `EpisodeSource.collect`."""
        assert self._policy is not None, "publish comes first"
        return collect(
            self._policy,
            self.env,
            order.episodes,
            temperature=self.temperature,
            seed=order.seed,
            groups=[order.first_group + i for i in range(len(order.specs)) for _ in range(order.size)],
            stopwatch=stopwatch,
            on_episode=on_episode,
            keep_inputs=True,
        )

    def metrics(self) -> dict[str, float]:
        """None: the run's own say it all."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing: no group is under way between rollouts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """Nothing was started."""
