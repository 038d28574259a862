"""A simulator in its own Python, on this machine or others: environments behind hosts, as one `VecEnv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.remote.client import DistantHost, HostWorker, LocalHost, RemoteOptions, same_spec
from sim.single_env import ChunkResult, SingleObservation
from sim.vector.commands import Command, SharedArrays
from sim.vector.pool import PoolVecEnv, assign, observation_layout, shut_down, start_all
from vla_rl.types import EnvSpec, Keyframe

_known_specs: dict[str, EnvSpec] = {}  # what hosts of this process have said, by their options


class RemoteConfig(RemoteOptions):
    """Any simulator, in its own Python on this machine or on others."""

    def env_spec(self) -> EnvSpec:
        """Facts about the environment, which only it knows: starts a host, unless one has told us before.

        Raises:
            RuntimeError: the host cannot start; with the end of its log.
        """
        if self.spec_key not in _known_specs:
            worker = self.worker(0, [0], record_frames=False)
            start_all([worker])
            shut_down([worker])
            _known_specs[self.spec_key] = worker.spec
        return _known_specs[self.spec_key]

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> RemoteVecEnv:
        """The vector environment: `num_envs` of these, in `num_hosts` processes.

        Raises:
            RuntimeError: a host cannot start; with the end of its log.
        """
        return RemoteVecEnv(self, num_envs or self.num_envs, record_frames)

    @property
    def spec_key(self) -> str:
        """The options that decide what the environment says of itself."""
        return self.model_dump_json(include={"env", "kwargs", "facts", "python", "python_path", "working_dir", "hosts"})

    def worker(self, index: int, env_ids: list[int], record_frames: bool) -> HostWorker:
        """Our side of a host, which is yet to be started."""
        return (DistantHost if self.hosts else LocalHost)(index, env_ids, self, record_frames)


class RemoteVecEnv(PoolVecEnv):
    """Environments assigned in turn to `config.num_hosts` hosts."""

    def __init__(self, config: RemoteConfig, num_envs: int, record_frames: bool = False) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        hosts = [
            config.worker(i, env_ids, record_frames) for i, env_ids in enumerate(assign(num_envs, config.num_hosts))
        ]
        start_all(hosts)
        spec = hosts[0].spec
        if differing := [host.name for host in hosts if not same_spec(host.spec, spec)]:
            shut_down(hosts)
            raise RuntimeError(f"{', '.join(differing)} states other facts of {config.env} than {hosts[0].name}")
        self._hosts = hosts
        self._shared = None if config.hosts else SharedArrays(observation_layout(spec, num_envs))
        for host in hosts:
            host.shared = self._shared
        super().__init__(spec, num_envs, record_frames, hosts)
        _known_specs[config.spec_key] = spec

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the hosts on this machine, for tools that watch them."""
        return [host.process.pid for host in self._hosts if isinstance(host, LocalHost)]

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """Not part of what a host answers."""
        raise NotImplementedError(
            f"{self.spec.kind} does not say how far its tasks are from done; rac.person.alarm=clock does without"
        )

    def _reserve_frames(self, num_steps: int) -> None:
        if self._shared is not None:
            super()._reserve_frames(num_steps)

    def _expand(self, command: Command, env_id: int, payload: Any) -> Any:
        try:
            return self._read_answer(command, env_id, payload)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RuntimeError(
                f"environment {env_id} answered to {command} with something unusable: {type(error).__name__}: {error}"
            ) from error

    def _read_answer(self, command: Command, env_id: int, payload: Any) -> Any:
        if command == "save_state":
            return Keyframe(payload["env"], payload["task"], payload["step"], payload["arrays"])
        if command == "expert_action":
            return self._array(payload, (self.spec.action_dim,), "float32", "expert action")
        if command == "reset":
            return self._observation(env_id, *payload)
        instruction, arrays, (reward, terminated, truncated, num_steps, success), frames = payload
        number = (len(reward),)
        outcome = (
            self._array(reward, number, "float32", "reward"),
            self._array(terminated, number, "bool", "terminated"),
            self._array(truncated, number, "bool", "truncated"),
            int(num_steps),
            bool(success),
        )
        if self._shared is not None:
            return self._read_step(self._shared, env_id, instruction, outcome)
        result = ChunkResult(self._observation(env_id, instruction, arrays), *outcome)
        if frames is not None:
            size = (result.num_steps, *self.spec.image_size, 3)
            result.frames = {c: self._array(frames[f"image.{c}"], size, "uint8", c) for c in self.spec.cameras}
            result.states = self._array(frames["state"], (size[0], self.spec.state_dim), "float32", "states")
        return result

    def _observation(self, env_id: int, instruction: str, arrays: Any) -> SingleObservation:
        if self._shared is not None:
            return self._read(self._shared, env_id, instruction)
        shape = (*self.spec.image_size, 3)
        images = {c: self._array(arrays[f"image.{c}"], shape, "uint8", c) for c in self.spec.cameras}
        return SingleObservation(
            images, self._array(arrays["state"], (self.spec.state_dim,), "float32", "state"), instruction
        )

    @staticmethod
    def _array(value: Any, shape: tuple[int, ...], dtype: str, what: str) -> np.ndarray:
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ValueError(f"{what} is {found}, expected {dtype} {shape}")
        return value
