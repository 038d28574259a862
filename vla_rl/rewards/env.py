"""Reward wrapper: an environment rewarded, and ended, by a reward model in place of the simulator's success.

The simulator does not end an episode at its success (a robot would not know of it): the reward, asked every
`RewardModel.every` control steps (where that is None: where a chunk ends) and at the horizon, ends it where it counts a
success, else the horizon does. The truth is kept beside it, in `info["true_success"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from vla_rl.interfaces import ProgressEnv, VecEnv
from vla_rl.rewards.base import RewardModel
from vla_rl.rollout.env_checks import checked_ids
from vla_rl.rollout.practice import PracticeEnv
from vla_rl.rollout.success import TRUE_SUCCESS
from vla_rl.types import EpisodeSpec, Keyframe, Observation, StepResult

NEVER = 10**9  # Control steps after a success: the simulator does not end an episode for it.


class WholeEnv(ProgressEnv, PracticeEnv, VecEnv, Protocol):
    """What every simulator of `SimConfig` can."""


class RewardedEnv(WholeEnv):
    """A simulator whose episodes a reward model judges. See the module.

    Args:
        env: whose episodes go on after success, to their horizon.
    """

    def __init__(self, env: WholeEnv, reward: RewardModel) -> None:
        self.num_envs, self._env, self._reward = env.num_envs, env, reward
        self.spec = replace(env.spec, approximation="success is what env.reward says")
        self._since = np.zeros(env.num_envs, np.int64)  # Control steps, since it was last judged.
        self._said = {name: np.zeros(env.num_envs, np.float32) for name in ("success", "progress")}  # Then.

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """See `VecEnv.reset`."""
        ids = checked_ids(env_ids, self.num_envs)
        obs = self._env.reset(specs, ids)
        self._judge(obs, ids, True, np.zeros(len(ids), bool))
        return obs

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`.

        Raises:
            ValueError: so many actions at a time do not end where the reward judges.
        """
        self._check_interval(actions.shape[1])
        ids = checked_ids(env_ids, self.num_envs)
        return self._judged(self._env.step(actions, ids), ids)

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """See `VecEnv.save_state`."""
        return self._env.save_state(env_ids)

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `VecEnv.expert_action`."""
        return self._env.expert_action(env_ids)

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `ProgressEnv.expert_remaining`."""
        return self._env.expert_remaining(env_ids)

    def drive_home(self, env_ids: Sequence[int] | None = None) -> list[Keyframe | None]:
        """See `PracticeEnv.drive_home`."""
        return self._env.drive_home(env_ids)

    def close(self) -> None:
        """See `VecEnv.close`."""
        self._env.close()

    def _judged(self, result: StepResult, ids: Sequence[int]) -> StepResult:
        every = self._reward.every
        self._since[ids] += result.num_steps
        due = np.flatnonzero(result.done | (every is None or self._since[ids] >= every))
        counts = np.zeros(len(ids), bool)
        self._reward.watch(result, ids)
        if len(due):
            said = self._judge(result.obs.select(due), [ids[row] for row in due], False, result.success[due])
            counts[due] = said & ~result.lost[due]
        rows, last = np.arange(len(ids)), np.maximum(result.num_steps - 1, 0)
        reward, terminated = np.zeros_like(result.reward), np.zeros_like(result.terminated)
        reward[rows, last], terminated[rows, last] = counts, counts | result.terminated.any(1)
        truth = {TRUE_SUCCESS: result.success.astype(np.float32)}
        said_last = {"reward_probability": self._said["success"][ids], "reward_progress": self._said["progress"][ids]}
        return replace(
            result,
            reward=reward,
            terminated=terminated,
            truncated=result.truncated & ~counts[:, None],
            success=counts,
            info=result.info | truth | said_last,
        )

    def _judge(self, obs: Observation, ids: Sequence[int], begins: bool, told: np.ndarray) -> np.ndarray:
        """Ask the reward of what these environments show; whether each counts as a success, bool (B,)."""
        judged = self._reward.observe(obs, ids, np.full(len(ids), begins), told)
        self._since[ids], self._said["success"][ids], self._said["progress"][ids] = 0, judged.success, judged.progress
        return judged.counts

    def _check_interval(self, count: int) -> None:
        every = self._reward.every
        if every is not None and every % count:
            raise ValueError(
                f"env.reward: judges every {every} control steps, as it was fitted; got {count} actions at a time, of "
                f"which {every} is no multiple. Let the policy execute as many as divide it (policy.num_actions), or "
                f"fit the reward again with reward.every={count}"
            )
