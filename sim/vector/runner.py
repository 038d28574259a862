"""N environments as one `VecEnv`: the checks and the bookkeeping, and the variant that runs in this process.

`sim.vector.processes` holds the variant with worker processes. Both give the same results, to the bit.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.rendering.devices import render_here
from sim.single_env import ChunkResult, SingleEnv, SingleObservation
from sim.vector.commands import Command, SimOptions, run_command
from vla_rl.rollout.env_checks import (
    EnvStatus,
    check_num_envs,
    check_running,
    check_specs,
    check_started,
    checked_actions,
    checked_ids,
)
from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe, Observation, StepResult

log = logging.getLogger(__name__)


class BaseVecEnv(ABC):
    """What every vector runner shares: input checks, which episodes run, and putting batches together.

    A runner implements `_call`. An environment that `_call` leaves out of its answer has broken
    (its worker died or hung); so has one named to `_mark_broken`. Its episode is then returned as lost.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, record_frames: bool) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.record_frames = record_frames
        self._status: list[EnvStatus] = ["never started"] * num_envs
        self._instruction = [""] * num_envs

    @abstractmethod
    def _call(self, command: Command, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Run a method of `SingleEnv` in each environment: environment id -> argument to id -> answer."""

    @abstractmethod
    def close(self) -> None:
        """Release workers and renderers. May be called twice."""

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """Start one episode in each given environment (see `VecEnv.reset`)."""
        ids = checked_ids(env_ids, self.num_envs)
        check_specs(specs, ids, self.spec)
        self._set_status(ids, "ended")
        wanted = missing = dict(zip(ids, specs, strict=True))
        first: dict[int, SingleObservation] = {}
        while missing:  # a worker that breaks here has been restarted, or _call has raised
            first.update(self._call("reset", missing))
            self._set_status([i for i in missing if i in first], "running")
            missing = {i: spec for i, spec in wanted.items() if self._status[i] != "running"}
        for i in ids:
            self._instruction[i] = first[i].instruction
        return self._stack([first[i] for i in ids])

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """Execute a chunk in each given environment (see `VecEnv.step`)."""
        ids = checked_ids(env_ids, self.num_envs)
        chunks = checked_actions(actions, ids, self.spec.action_dim)
        check_running("step", ids, self._status)
        alive = {i: chunk for i, chunk in zip(ids, chunks, strict=True) if self._status[i] == "running"}
        self._set_status(ids, "ended")  # also where _call raises
        answers, num_actions = self._call("step", alive), chunks.shape[1]
        for i, answer in list(answers.items()):
            if not np.isfinite(answer.obs.state).all():
                log.warning("environment %d: its state is no longer finite; its episode counts as lost", i)
                del answers[i]
        results = [answers.get(i) or self._lost_result(i, num_actions) for i in ids]
        info: dict[str, Any] = {}
        if self.record_frames:
            info = {"frames": [r.frames for r in results], "states": [r.states for r in results]}
        if self.spec.objects:
            info["objects"] = [r.objects for r in results]
        result = StepResult(
            obs=self._stack([r.obs for r in results]),
            reward=np.stack([r.reward for r in results]),
            terminated=np.stack([r.terminated for r in results]),
            truncated=np.stack([r.truncated for r in results]),
            num_steps=np.array([r.num_steps for r in results], np.int64),
            success=np.array([r.success for r in results], bool),
            lost=np.array([i not in answers for i in ids], bool),
            info=info,
        )
        self._set_status([i for i, done in zip(ids, result.done, strict=True) if not done], "running")
        return result

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """Full state of each given environment, for `EpisodeSpec.keyframe`.

        Raises:
            RuntimeError: the environment's worker broke; its next `step` says lost.
        """
        ids = checked_ids(env_ids, self.num_envs)
        check_started("save_state", ids, self._status)
        answers = self._call("save_state", dict.fromkeys(i for i in ids if self._status[i] != "broken"))
        if broken := [i for i in ids if i not in answers]:
            raise RuntimeError(f"save_state: the worker of environments {broken} broke, so there is no state to save")
        return [answers[i] for i in ids]

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """The scripted expert's next action, float32 (B, A); zeros where the worker broke."""
        ids = checked_ids(env_ids, self.num_envs)
        check_running("expert_action", ids, self._status)
        answers = self._call("expert_action", dict.fromkeys(i for i in ids if self._status[i] != "broken"))
        zeros = np.zeros(self.spec.action_dim, np.float32)
        return np.stack([answers.get(i, zeros) for i in ids]).astype(np.float32, copy=False)

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """About how many control steps the scripted expert would need from here, float64 (B,).

        Infinite where it could not finish; 0 where a worker broke.

        Raises:
            NotImplementedError: the simulator does not say.
        """
        ids = checked_ids(env_ids, self.num_envs)
        check_running("expert_remaining", ids, self._status)
        answers = self._call("expert_remaining", dict.fromkeys(i for i in ids if self._status[i] != "broken"))
        return np.array([answers.get(i, 0.0) for i in ids], np.float64)

    def drive_home(self, env_ids: Sequence[int] | None = None) -> list[Keyframe | None]:
        """End the episode of each given environment, and drive home (see `PracticeEnv`); None where a worker broke.

        Raises:
            NotImplementedError: the simulator knows no way.
        """
        ids = checked_ids(env_ids, self.num_envs)
        check_started("drive_home", ids, self._status)
        answers = self._call("drive_home", dict.fromkeys(i for i in ids if self._status[i] != "broken"))
        self._set_status(ids, "ended")
        return [answers.get(i) for i in ids]

    def _mark_broken(self, env_ids: Sequence[int]) -> None:
        """Episodes under way in these environments are lost; their next `step` says so."""
        self._set_status([i for i in env_ids if self._status[i] == "running"], "broken")

    def _set_status(self, env_ids: Sequence[int], status: EnvStatus) -> None:
        for i in env_ids:
            self._status[i] = status

    def _stack(self, parts: list[SingleObservation]) -> Observation:
        return Observation(
            images={camera: np.stack([p.images[camera] for p in parts]) for camera in self.spec.cameras},
            state=np.stack([p.state for p in parts]),
            instruction=[p.instruction for p in parts],
        )

    def _lost_result(self, env_id: int, num_actions: int) -> ChunkResult:
        """The answer of an environment that broke: black images, nothing executed."""
        size = self.spec.image_size
        return ChunkResult(
            obs=SingleObservation(
                {camera: np.zeros((*size, 3), np.uint8) for camera in self.spec.cameras},
                np.zeros(self.spec.state_dim, np.float32),
                self._instruction[env_id],
            ),
            reward=np.zeros(num_actions, np.float32),
            terminated=np.zeros(num_actions, bool),
            truncated=np.zeros(num_actions, bool),
            num_steps=0,
            success=False,
            objects=np.full((1, len(self.spec.objects), 4), np.nan, np.float32) if self.spec.objects else None,
            frames={camera: np.zeros((0, *size, 3), np.uint8) for camera in self.spec.cameras},
            states=np.zeros((0, self.spec.state_dim), np.float32),
        )


class InlineVecEnv(BaseVecEnv):
    """All environments in this process, one after the other."""

    def __init__(self, config: SimOptions, num_envs: int, record_frames: bool = False) -> None:
        check_num_envs(num_envs)
        super().__init__(config.env_spec(), num_envs, record_frames)
        render_here(config.render_devices)
        self._envs: list[SingleEnv] = [config.start(record_frames) for _ in range(num_envs)]

    def _call(self, command: Command, arguments: Mapping[int, Any]) -> dict[int, Any]:
        assert self._envs, "the environment is closed"
        return {i: run_command(self._envs[i], command, argument) for i, argument in arguments.items()}

    def close(self) -> None:
        """Release the simulators and renderers. May be called twice."""
        for env in self._envs:
            env.close()
        self._envs = []
