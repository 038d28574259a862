"""The vector runner with worker processes: several environments each, images and states in shared memory.

What happens to a worker that dies or hangs is `sim.vector.pool`'s to say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from sim.vector.body import EmbodiedEnv, SimulatedBody
from sim.vector.commands import Command, SharedArrays, SimOptions
from sim.vector.pool import THREAD_VARIABLES, ChildWorker, PoolVecEnv, assign, observation_layout, start_all
from vla_rl.rollout.body import Body
from vla_rl.rollout.env_checks import check_num_envs
from vla_rl.types import EpisodeSpec, Keyframe

START_SECONDS = 300.0  # for importing the simulator and making the environments; a reset may load a scene, too


class WorkerProcess(ChildWorker):
    """A worker that runs `sim.vector.worker` in this Python."""

    connection: Connection

    def __init__(
        self, place: tuple[int, int], env_ids: list[int], config: SimOptions, record_frames: bool, shared: SharedArrays
    ) -> None:
        """place: which worker this is, of how many."""
        super().__init__(f"worker {place[0]}", env_ids, START_SECONDS, config.step_timeout)
        self._shared = shared
        self._setup = {
            "layout": shared.layout,
            "config_class": _import_path(type(config)),
            "config": config.model_dump_json(),
            "env_ids": env_ids,
            "record_frames": record_frames,
            "place": place,
        }
        self._environ = {
            **dict.fromkeys(THREAD_VARIABLES, "1"),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as output:
            self.log_fd = os.dup(output.fileno())
            command = [sys.executable, "-P", "-X", "faulthandler", "-m", "sim.vector.worker"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self._frames: SharedArrays | None = None
        try:
            self.connection.send(self._setup)
            reduction.send_handle(self.connection, self._shared.fd, self.process.pid)
        except ConnectionError:
            pass  # it died at once: wait_ready says why

    def wait_ready(self) -> None:
        if self.ready:
            return
        try:
            if not self.connection.poll(START_SECONDS):
                raise RuntimeError(f"{self.name} did not start within {START_SECONDS:.0f} s.{self.hang_trace()}")
            word, text = self.connection.recv()
        except (EOFError, ConnectionError):
            word, text = "failed", f"{self.exit_reason()}.{self.log_tail()}"
        if word != "ready":
            raise RuntimeError(f"{self.name} (environments {self.env_ids}) cannot start:\n{text}")
        self.ready = True

    def send(self, serial: int, command: Command, arguments: Mapping[int, Any], frames: SharedArrays | None) -> None:
        if frames is not self._frames and frames is not None:
            self.connection.send((serial, "frames", frames.layout))
            reduction.send_handle(self.connection, frames.fd, self.process.pid)
            self._frames = frames
        self.connection.send((serial, command, arguments))


def _import_path(config_class: type) -> str:
    if config_class.__module__ == "__main__" or "<locals>" in config_class.__qualname__:
        raise ValueError(
            f"{config_class.__qualname__} is defined in the running script or in a function, where worker processes "
            "cannot import it: move it to a module of its own, or use num_workers=0"
        )
    return f"{config_class.__module__}:{config_class.__qualname__}"


class ProcessVecEnv(PoolVecEnv):
    """Environments assigned in turn to `config.num_workers` processes."""

    def __init__(self, config: SimOptions, num_envs: int, record_frames: bool = False) -> None:
        check_num_envs(num_envs)
        spec = config.env_spec()
        self._shared = SharedArrays(observation_layout(spec, num_envs))
        assigned = assign(num_envs, config.num_workers)
        workers = [
            WorkerProcess((i, len(assigned)), env_ids, config, record_frames, self._shared)
            for i, env_ids in enumerate(assigned)
        ]
        start_all(workers)
        super().__init__(spec, num_envs, record_frames, workers)
        self._processes = workers

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, for tools that watch them."""
        return [worker.process.pid for worker in self._processes]

    def close(self) -> None:
        super().close()
        self._shared.close()

    def _expand(self, command: Command, env_id: int, payload: Any) -> Any:
        if command == "reset":
            return self._read(self._shared, env_id, payload)
        if command != "step":
            return payload
        instruction, *outcome = payload
        return self._read_step(self._shared, env_id, instruction, outcome)


class BodyProcesses:
    """See `vla_rl.rollout.body.Body`: `config.num_workers` processes, each with a simulator, share the bodies."""

    def __init__(self, config: SimOptions) -> None:
        self._pool = ProcessVecEnv(config, config.num_workers)

    def begin(self, specs: Sequence[EpisodeSpec]) -> tuple[list[Keyframe], np.ndarray]:
        """See `Body.begin`."""
        return self._shared_out("begin_bodies", [[specs[i] for i in rows] for rows in self._shares(len(specs))])

    def step(self, bodies: Sequence[Keyframe], actions: np.ndarray) -> tuple[list[Keyframe], np.ndarray]:
        """See `Body.step`."""
        shares = self._shares(len(bodies))
        return self._shared_out("move_bodies", [([bodies[i] for i in rows], actions[rows]) for rows in shares])

    def _shares(self, size: int) -> list[np.ndarray]:
        return np.array_split(np.arange(size), min(self._pool.num_envs, size))

    def _shared_out(self, command: Command, arguments: Sequence[Any]) -> tuple[list[Keyframe], np.ndarray]:
        answers = self._pool.ask(command, dict(enumerate(arguments)))
        parts = [answers[i] for i in range(len(arguments))]
        return [body for bodies, _ in parts for body in bodies], np.concatenate([states for _, states in parts])

    @property
    def worker_pids(self) -> list[int]:
        """See `ProcessVecEnv`."""
        return self._pool.worker_pids

    def close(self) -> None:
        """See `Body.close`."""
        self._pool.close()


def simulated_body(config: SimOptions) -> Body:
    """The robot alone, in this process or in `config.num_workers` others."""
    return BodyProcesses(config) if config.num_workers else SimulatedBody(cast(EmbodiedEnv, config.start()))
