"""How much a policy loses by its latency: each chunk arrives some control steps after what it was decided on.

As on a robot (`real_robot/control/chunk_executor.py`): the policy is asked every `every` steps; until the answer comes
the last chunk plays on, and the answer goes on at the step reached, what it says of those before is skipped. The first
chunk of an episode is waited for while nothing moves and no time counts. What deploy does besides is left out: chunks
are not blended, and none is late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.common.row_noise import RowGenerator
from vla_rl.config import ConfigError
from vla_rl.interfaces import ContinuingPolicy, PlanningConfig, PlanningPolicy, Policy
from vla_rl.types import ActionChunk, ActionPrefix, Observation


class DelayConfig(PlanningConfig):
    """The policy's own actions, each chunk some control steps late."""

    kind: Literal["delay"] = "delay"
    delay: NonNegativeInt = Field(description="Control steps from an observation to the chunk decided on it.")
    every: PositiveInt = Field(
        description="Control steps from one observation to the next that the policy is shown: at least the delay, "
        "since one answer is awaited at a time."
    )
    continues: bool = Field(
        default=False,
        description="Give the policy the actions that are played meanwhile, to go on from (real-time chunking). For "
        "policies that can, at temperature 0.",
    )

    def build(self, policy: Policy, device: str = "cpu") -> PlanningPolicy:
        """The policy, late.

        Raises:
            ConfigError: its chunks are too short, it is asked before it has answered, or it cannot continue.
        """
        if self.every < self.delay:
            raise ConfigError(f"plan.every: got {self.every}, must be at least plan.delay, {self.delay}")
        if (size := self.every + self.delay) > policy.chunk_size:
            raise ConfigError(
                f"plan.delay: a chunk must last until the next one arrives, {size} steps (every + delay), and the "
                f"policy's last {policy.chunk_size}; lower plan.delay or plan.every, or clone with a larger "
                "policy.chunk_size"
            )
        if self.continues and not isinstance(policy, ContinuingPolicy):
            raise ConfigError(
                f"plan.continues: true, but {type(policy).__name__} cannot go on from given actions; set it to false"
            )
        return cast(PlanningPolicy, LatePolicy(policy, self))  # What it lacks, it takes from the policy.

    def protocol(self) -> str:
        told = ", told of the actions meanwhile" if self.continues else ""
        return f"chunks {self.delay} control steps late, asked for every {self.every}{told}"


class LatePolicy:
    """A policy whose chunks come late. It remembers each episode's last chunk: `watch` says which row is which.

    Attributes:
        chunk_size: the actions of a decision, `every`.
        seconds: of each `act`.
    """

    def __init__(self, policy: Policy, config: DelayConfig) -> None:
        self.policy, self.config, self.chunk_size = policy, config, config.every
        self.seconds: list[float] = []
        self._ids: list[int] = []
        self._last: dict[int, np.ndarray] = {}  # Environment -> the chunk that is played, (C, A).

    def __getattr__(self, name: str) -> Any:
        """All else is the policy's: cameras, mode, device."""
        return getattr(self.policy, name)

    def watch(self, env_ids: Sequence[int], begins: Sequence[bool], tasks: Sequence[str]) -> None:
        """See `WatchingPolicy`."""
        self._ids = list(env_ids)
        for env_id, begin in zip(env_ids, begins, strict=True):
            if begin:
                self._last.pop(env_id, None)

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """What each robot does until the policy is shown the next observation, float32 (B, every, A).

        Raises:
            ConfigError: a temperature above 0 for a policy that continues, which it does greedily.
        """
        if self.config.continues and temperature > 0:
            raise ConfigError(f"plan.continues: is greedy, got temperature {temperature:g}; set eval.temperatures=[0]")
        started, every, delay = time.perf_counter(), self.config.every, self.config.delay
        under_way = [self._last.get(env_id) for env_id in self._ids]
        begun = [row for row, last in enumerate(under_way) if last is not None]
        told = begun if self.config.continues and delay else []
        plain = [row for row in range(obs.batch_size) if row not in told]
        chunks: dict[int, np.ndarray] = {}
        for rows in filter(None, (plain, told)):
            source = generator.select(rows) if isinstance(generator, RowGenerator) else generator
            seen = obs.select(rows)
            if rows is plain:
                actions = self.policy.act(seen, source, temperature).actions
            else:
                rest = np.stack([self._last[self._ids[row]][every:] for row in rows])
                continuing = cast(ContinuingPolicy, self.policy)
                actions = continuing.act_with_prefix(seen, ActionPrefix(rest, delay), source).actions
            chunks |= zip(rows, actions, strict=True)
        played = np.stack([chunks[row][:every] for row in range(obs.batch_size)])
        for row in begun:
            played[row, :delay] = self._last[self._ids[row]][every : every + delay]
        self._last |= {env_id: chunks[row] for row, env_id in enumerate(self._ids)}
        self.seconds.append(time.perf_counter() - started)
        return ActionChunk(played)

    def latency(self) -> dict[str, float]:
        """Milliseconds of a decision of all environments together, mean."""
        return {"act_ms": float(1000 * np.mean(self.seconds or [np.nan]))}


METHOD = DelayConfig
