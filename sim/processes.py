"""The vector runner with worker processes: several environments each, images and states in shared memory.

A worker that dies, or stays silent for `step_timeout`, is killed and started again; its running
episodes are returned as lost, with a warning that says why. It never stalls the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from sim.base import ChunkResult, SimConfig, SingleObservation
from sim.shared_arrays import Layout, SharedArrays
from sim.vector import BaseVecEnv, Command, rendering_variables
from sim.worker import CALLER_ERRORS

log = logging.getLogger(__name__)

START_SECONDS = 300.0  # for importing the simulator and making the environments; a reset may load a scene, too
CLOSE_SECONDS = 5.0
MAX_FAILURES = 3  # of one worker, with no completed step in between
_TAIL = 2000  # characters of a worker's stderr that a message shows
# One thread per worker: the workers themselves fill the cores. The user's own settings win.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")


class WorkerProcess:
    """The parent's side of one worker."""

    def __init__(self, index: int, env_ids: list[int], config: SimConfig, record_frames: bool, shared: SharedArrays):
        self.index = index
        self.env_ids = env_ids
        self.failures = 0
        self._shared = shared
        self._setup = {
            "layout": shared.layout,
            "config_class": _import_path(type(config)),
            "config": config.model_dump_json(),
            "env_ids": env_ids,
            "record_frames": record_frames,
        }
        self._environ = {
            **dict.fromkeys(_THREADS, "1"),
            **os.environ,
            **rendering_variables(config, index),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }

    def start(self) -> None:
        """Start the process; it makes its environments while we do other things. See `wait_ready`."""
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as stderr:
            self._stderr = os.dup(stderr.fileno())
            command = [sys.executable, "-P", "-X", "faulthandler", "-m", "sim.worker"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
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
        """Wait until the environments exist.

        Raises:
            RuntimeError: they cannot be made; with the worker's own error text.
        """
        if self.ready:
            return
        try:
            if not self.connection.poll(START_SECONDS):
                raise RuntimeError(
                    f"worker {self.index} did not start within {START_SECONDS:.0f} s.{self._hang_trace()}"
                )
            word, text = self.connection.recv()
        except (EOFError, ConnectionError):
            word, text = "failed", f"{self._exit_reason()}.{self._stderr_tail()}"
        if word != "ready":
            raise RuntimeError(f"worker {self.index} (environments {self.env_ids}) cannot start:\n{text}")
        self.ready = True

    def send(self, serial: int, command: Command, arguments: Mapping[int, Any], frames: SharedArrays | None) -> None:
        """Ask for a command in some of its environments; one answer comes for each.

        Raises:
            ConnectionError: the worker has died.
        """
        if frames is not self._frames and frames is not None:
            self.connection.send((serial, "frames", frames.layout))
            reduction.send_handle(self.connection, frames.fd, self.process.pid)
            self._frames = frames
        self.connection.send((serial, command, arguments))

    def restart(self, hung_seconds: float | None = None) -> None:
        """Kill what is left of the process, say why, and start it anew.

        Raises:
            RuntimeError: it failed MAX_FAILURES times with no completed step in between.
        """
        if hung_seconds is None:
            reason = f"{self._exit_reason()}.{self._stderr_tail()}"
        else:
            reason = f"gave no answer for {hung_seconds:.0f} s (env.step_timeout) and was killed.{self._hang_trace()}"
        self.failures += 1
        self.kill()
        message = f"worker {self.index} (environments {self.env_ids}) {reason}"
        if self.failures >= MAX_FAILURES:
            raise RuntimeError(f"{message}\nIt failed {self.failures} times without completing a step; giving up.")
        log.warning("%s\nIts running episodes are lost; it is started again.", message)
        self.start()

    def kill(self) -> None:
        """End the process at once and free what belongs to it. May be called twice."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        if self._stderr >= 0:
            os.close(self._stderr)
        self._stderr = -1

    def _exit_reason(self) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"died with exit code {code}{name}"

    def _hang_trace(self) -> str:
        """Where a hung worker is: its Python stacks, as it prints them itself on SIGUSR1."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return self._stderr_tail()

    def _stderr_tail(self) -> str:
        size = os.fstat(self._stderr).st_size
        text = os.pread(self._stderr, _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
        return f" The end of its stderr:\n{text}" if text else " It wrote nothing to stderr."


def _import_path(config_class: type) -> str:
    if config_class.__module__ == "__main__" or "<locals>" in config_class.__qualname__:
        raise ValueError(
            f"{config_class.__qualname__} is defined in the running script or in a function, where worker processes "
            "cannot import it: move it to a module of its own, or use num_workers=0"
        )
    return f"{config_class.__module__}:{config_class.__qualname__}"


class ProcessVecEnv(BaseVecEnv):
    """Environments dealt in turn to `config.num_workers` processes."""

    def __init__(self, config: SimConfig, num_envs: int, record_frames: bool = False) -> None:
        super().__init__(config.env_spec(), num_envs, record_frames)
        self._step_timeout = config.step_timeout
        self._serial = 0
        self._shared = SharedArrays(self._layout(num_envs))
        self._frames: SharedArrays | None = None
        num_workers = min(config.num_workers, num_envs)
        self._workers = [
            WorkerProcess(i, list(range(i, num_envs, num_workers)), config, record_frames, self._shared)
            for i in range(num_workers)
        ]
        started: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _shut_down, started)  # also at interpreter exit
        try:
            for worker in self._workers:
                worker.start()
                started.append(worker)
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, for tools that watch them."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers and free the shared memory. May be called twice."""
        self._finalizer()
        self._shared.close()
        if self._frames is not None:
            self._frames.close()

    def _layout(self, *lead: int) -> Layout:
        """Of one observation per element of the leading shape."""
        layout: Layout = {f"image.{c}": ((*lead, *self.spec.image_size, 3), "uint8") for c in self.spec.cameras}
        return {**layout, "state": ((*lead, self.spec.state_dim), "float32")}

    def _call(self, command: Command, arguments: Mapping[int, Any]) -> dict[int, Any]:
        assert self._finalizer.alive, "the environment is closed"
        if command == "step" and self.record_frames and arguments:
            self._reserve_frames(max(len(chunk) for chunk in arguments.values()))
        self._serial += 1  # answers to a call that an exception (Ctrl-C) cut short are thrown away
        pending = self._send_all(command, arguments)
        answers: dict[int, Any] = {}
        errors: list[Exception] = []
        timeout = max(self._step_timeout, START_SECONDS) if command == "reset" else self._step_timeout
        deadline = {worker: time.monotonic() + timeout for worker in pending}
        while pending:
            wait = max(0.0, min(deadline[worker] for worker in pending) - time.monotonic())
            speaking = mp_connection.wait([worker.connection for worker in pending], wait)
            for worker in [w for w in pending if w.connection in speaking]:
                deadline[worker] = time.monotonic() + timeout
                try:
                    serial, env_id, status, payload = worker.connection.recv()
                except (EOFError, ConnectionError):
                    del pending[worker]
                    self._replace(worker, answers)
                    continue
                if serial != self._serial:
                    continue
                if status == "ok":
                    answers[env_id] = self._expand(command, env_id, payload)
                    worker.failures = 0 if command == "step" else worker.failures
                else:
                    errors.append(_caller_error(status, payload, worker, env_id))
                pending[worker].discard(env_id)
                if not pending[worker]:
                    del pending[worker]
            for worker in [w for w in pending if time.monotonic() > deadline[w]]:
                del pending[worker]
                self._replace(worker, answers, hung_seconds=timeout)
        if errors:
            raise errors[0]
        return answers

    def _send_all(self, command: Command, arguments: Mapping[int, Any]) -> dict[WorkerProcess, set[int]]:
        """Send each worker its part. Returns worker -> environments that it owes an answer for."""
        pending: dict[WorkerProcess, set[int]] = {}
        for worker in sorted(self._workers, key=lambda w: not w.ready):  # a restarted one delays no other
            part = {i: arguments[i] for i in worker.env_ids if i in arguments}
            if not part:
                continue
            worker.wait_ready()
            try:
                worker.send(self._serial, command, part, self._frames)
                pending[worker] = set(part)
            except ConnectionError:
                self._replace(worker, {})
        return pending

    def _replace(self, worker: WorkerProcess, answers: dict[int, Any], hung_seconds: float | None = None) -> None:
        """Restart a broken worker. What it answered within this call is void: its environments are gone."""
        for i in worker.env_ids:
            answers.pop(i, None)
        self._mark_broken(worker.env_ids)
        worker.restart(hung_seconds)

    def _reserve_frames(self, num_steps: int) -> None:
        """Memory for the frames of `num_steps` control steps, which workers attach before their next command."""
        if self._frames is not None:
            if self._frames["state"].shape[1] >= num_steps:
                return
            self._frames.close()
        self._frames = SharedArrays(self._layout(self.num_envs, num_steps))

    def _expand(self, command: Command, env_id: int, payload: Any) -> Any:
        """The answer as `SingleEnv` gave it. Images are views of the shared memory, frames are copies."""
        if command == "reset":
            return self._read(env_id, payload)
        if command != "step":
            return payload
        instruction, *outcome = payload
        result = ChunkResult(self._read(env_id, instruction), *outcome)
        if self.record_frames:
            assert self._frames is not None, "memory for frames is reserved before the step"
            rows = slice(0, result.num_steps)
            result.frames = {c: self._frames[f"image.{c}"][env_id, rows].copy() for c in self.spec.cameras}
            result.states = self._frames["state"][env_id, rows].copy()
        return result

    def _read(self, env_id: int, instruction: str) -> SingleObservation:
        images = {camera: self._shared[f"image.{camera}"][env_id] for camera in self.spec.cameras}
        return SingleObservation(images, self._shared["state"][env_id], instruction)


def _caller_error(name: str, text: str, worker: WorkerProcess, env_id: int) -> Exception:
    if name in CALLER_ERRORS:
        return CALLER_ERRORS[name](text)
    return RuntimeError(f"environment {env_id} (worker {worker.index}) failed:\n{text}")


def _shut_down(workers: Sequence[WorkerProcess]) -> None:
    """Close every connection, which ends the workers; kill those that take too long."""
    deadline = time.monotonic() + CLOSE_SECONDS
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        worker.kill()
