"""DAgger (Ross et al. 2011, arXiv 1011.0686) for policies of chunks: an expert goes on from where a student has got.

    vla-rl collect RECIPE env.kind=dagger env.of.kind=tabletop env.student=FOLDER collect.keep=all

records the expert's next chunk from states that the student itself visits, as a dataset that `vla-rl sft` takes. The
expert drives these steps, and then the episode ends: labels told step by step while the student drives are no chunk,
since each answers what the student did after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, SerializeAsAny

from vla_rl.config import component
from vla_rl.interfaces import EnvConfig, Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.rollout.runner import derived_seed
from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe, Observation, StepResult


class DaggerConfig(EnvConfig):
    """An environment whose episodes begin where a student has got, and end after a chunk of the expert's.

    Initial state i is that of `of` with the number i // decisions, at the student's decision i % decisions, counted
    from 0; modulo the decisions it makes, where its episode ends before.
    """

    kind: Literal["dagger"] = "dagger"
    of: Annotated[SerializeAsAny[EnvConfig], component("env")] = Field(
        description="The environment: an env section with a scripted expert, which must go on from any state."
    )
    student: str = Field(description="The student: a policy's folder, or pretrained:NAME.")
    temperature: NonNegativeFloat = Field(default=1.0, description="Of the student's sampling; 0 is greedy.")
    decisions: PositiveInt = Field(default=4, description="States taken from each of the student's episodes.")
    steps: PositiveInt = Field(default=8, description="Control steps that the expert drives: the student's chunk_size.")

    def env_spec(self) -> EnvSpec:
        """Facts of `of`, with horizons of `steps`."""
        spec = self.of.env_spec()
        return replace(spec, horizon=dict.fromkeys(spec.tasks, self.steps))

    def without_expert(self) -> dict[str, str]:
        """See `EnvConfig.without_expert`."""
        return self.of.without_expert()

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> LedEnv:
        """Start the environment and load the student."""
        env = self.of.build(num_envs or self.num_envs, record_frames)
        return LedEnv(self, env, load_policy(self.student).eval())


class LedEnv(VecEnv):
    """See `DaggerConfig`. Stepped one action at a time, as the expert is asked."""

    def __init__(self, config: DaggerConfig, env: VecEnv, student: Policy) -> None:
        self.config, self.env, self.student = config, env, student
        self.num_envs, self.spec = env.num_envs, config.env_spec()
        self._steps = np.zeros(env.num_envs, np.int64)

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """See `VecEnv.reset`. The student drives one environment at a time, so that a state hangs on its spec alone."""
        ids = range(self.num_envs) if env_ids is None else env_ids
        self._steps[list(ids)] = 0
        return Observation.concatenate([self._led(spec, i) for spec, i in zip(specs, ids, strict=True)])

    def _led(self, spec: EpisodeSpec, env_id: int) -> Observation:
        first, decision = divmod(spec.index, self.config.decisions)
        while True:
            obs, made = self._driven(replace(spec, index=first), env_id, decision)
            if made is None:
                return obs
            decision %= made

    def _driven(self, spec: EpisodeSpec, env_id: int, decision: int) -> tuple[Observation, int | None]:
        """What is seen after so many of the student's decisions; how many it made, where the episode ended."""
        obs = self.env.reset([spec], [env_id])
        generator = torch.Generator().manual_seed(derived_seed(spec.index, *spec.task.encode()))
        for made in range(1, decision + 1):
            result = self.env.step(self.student.act(obs, generator, self.config.temperature).actions, [env_id])
            if result.lost[0]:
                raise RuntimeError(f"{spec.task} {spec.index}: the simulator broke; the same command goes on")
            obs = result.obs
            if result.done[0]:
                return obs, made
        return obs, None

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`; ValueError for more than one action."""
        if actions.shape[1] != 1:
            raise ValueError(
                f"env.kind 'dagger' takes one action at a time, got {actions.shape[1]}: collect.source=expert"
            )
        ids = list(range(self.num_envs) if env_ids is None else env_ids)
        result = self.env.step(actions, ids)
        self._steps[ids] += 1
        over = (self._steps[ids] >= self.config.steps)[:, None] & ~result.terminated & ~result.lost[:, None]
        return replace(result, truncated=result.truncated | over)

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """See `VecEnv.save_state`."""
        return self.env.save_state(env_ids)

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `VecEnv.expert_action`: it takes over from what the student has left."""
        return self.env.expert_action(env_ids)

    def close(self) -> None:
        """See `VecEnv.close`."""
        self.env.close()


METHOD = DaggerConfig
