"""Actors that hold the policy and run episodes at their hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.progress import Stopwatch
from vla_rl.config import validate
from vla_rl.interfaces import Policy
from vla_rl.rollout.actors.cluster import Setting, where_here
from vla_rl.rollout.actors.config import RayOptions
from vla_rl.rollout.actors.vec_env import RayVecEnv
from vla_rl.rollout.actors.weights import Packed, load_shards
from vla_rl.rollout.runner import collect
from vla_rl.rollout.source import RolloutPlan
from vla_rl.types import Episode, EpisodeSpec


class PolicyCopy:
    """The run's policy, made as its recipe says, with the weights that the trainer published last.

    Attributes:
        version: updates that the weights have seen.
    """

    def __init__(self, plan: Mapping[str, Any], setting: Setting) -> None:
        setting.enter()
        torch.set_num_threads(setting.num_threads)  # Of this thread, with which the policy acts.
        self.plan = validate(RolloutPlan, dict(plan))
        self.version = -1
        spec, device = self.plan.env.env_spec(), resolve_device(self.plan.device)
        self.policy: Policy = self.plan.policy.build(spec, device, self.plan.seed)

    @property
    def config(self) -> RayOptions:
        """The plan's section."""
        return cast("RayOptions", self.plan.rollout)  # Only Ray's sources make workers.

    def load(self, weights: Sequence[Packed], version: int) -> None:
        """Take over the trainable weights of this version, in shards."""
        if version != self.version:
            load_shards(self.policy, weights, f"the weights of update {version}")
            self.version = version


def stamped(episode: Episode, versions: Sequence[int]) -> Episode:
    """The episode with the version that drew each chunk."""
    return replace(episode, chunks=replace(episode.chunks, version=np.array(versions, np.int64)))


class LockstepWorker:
    """Runs whole rollouts as one process does: all environments step together, and nothing is learned meanwhile."""

    def __init__(self, plan: Mapping[str, Any], setting: Setting) -> None:
        self._plan, self._setting = plan, setting
        self._copy: PolicyCopy | None = None
        self._env: RayVecEnv | None = None
        self._stopwatch = Stopwatch()
        self._lock = threading.Lock()
        self._num_done = 0

    def where(self) -> tuple[str, int]:
        """See `where_here`."""
        return where_here()

    def done(self) -> tuple[tuple[int, int], list[str]]:
        """Return numbers that grow while something gets done, stages and episodes; and what broke in this rollout."""
        lines = [] if self._env is None else list(self._env.troubles.lines)
        return (Stopwatch.num_measured, self._num_done), lines

    def run(
        self, version: int, specs: Sequence[EpisodeSpec], size: int, seed: int, *weights: Packed
    ) -> tuple[dict[str, Any], *tuple[list[Episode], ...]]:
        """Run groups of `size` episodes, the specs `size` times each in a row; returns what happened, and each group.

        Args:
            seed: of the sampling, from which all draw in turn. weights: of this version, in shards.
        """
        with self._lock:
            if self._copy is None or self._env is None:
                self._copy = PolicyCopy(self._plan, self._setting)
                self._env = RayVecEnv(self._copy.plan.env, self._copy.config, self._setting)
            self._copy.load(weights, version)
            started = time.monotonic()
            self._stopwatch.restart()
            episodes = collect(
                self._copy.policy,
                self._env,
                specs,
                temperature=self._copy.plan.temperature,
                seed=seed,
                stopwatch=self._stopwatch,
                on_episode=self._count,
            )
            report = {
                "seconds": dict(self._stopwatch.seconds),
                "wall": time.monotonic() - started,
                "troubles": self._env.troubles.taken(),
            }
        stamps = [stamped(episode, [version] * episode.num_chunks) for episode in episodes]
        return report, *(stamps[start : start + size] for start in range(0, len(stamps), size))

    def _count(self, episode: Episode) -> None:
        self._num_done += 1
