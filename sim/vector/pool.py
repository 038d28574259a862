"""`VecEnv` over worker processes: commands, answers, restarts.

`sim.vector.processes` has the kind whose processes run our own Python and code; `sim.remote` the kind whose
processes run a simulator's own Python. A process that dies, or stays silent for `step_timeout`, is
killed and started again; its running episodes are returned as lost, with a warning that says why.
It never stalls the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from typing import Any, Protocol, cast

from sim.single_env import ChunkResult, SingleObservation
from sim.vector.commands import CALLER_ERRORS, Command, Layout, SharedArrays
from sim.vector.runner import BaseVecEnv
from vla_rl.types import EnvSpec

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
MAX_FAILURES = 3  # of one worker or environment, with no completed step in between
LOOK_SECONDS = 1.0  # how often it is looked whether a silent process still lives
# Errors that are the caller's and cross the process border by name; every other becomes a RuntimeError.
# One thread per worker: the workers themselves fill the cores. The user's own settings win.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")
_TAIL = 2000  # characters of a worker's log that a message shows


class Channel(Protocol):
    """The parent's end of a worker's socket."""

    def fileno(self) -> int: ...

    def recv(self) -> Any:
        """(serial of the call, environment id, status, answer). Raises EOFError or ConnectionError."""
        ...

    def close(self) -> None: ...


class Worker(ABC):
    """The parent's side of one process that holds environments.

    Attributes:
        name: for messages, such as "worker 2". env_ids: the environments that it holds.
        failures: since its last completed step. ready: its environments exist. heard: when it last spoke, in seconds.
        start_timeout, step_timeout: seconds; `timeout_option` names the option that sets the latter, if one does.
    """

    connection: Channel
    ready: bool = False
    failures: int = 0
    heard: float = 0.0
    timeout_option = ""

    def __init__(self, name: str, env_ids: list[int], start_timeout: float, step_timeout: float) -> None:
        self.name, self.env_ids = name, env_ids
        self.start_timeout, self.step_timeout = start_timeout, step_timeout

    @abstractmethod
    def start(self) -> None:
        """Start the process or reach it; it makes its environments while we do other things. See `wait_ready`."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the environments exist.

        Raises:
            RuntimeError: they cannot be made; with the worker's own error text.
        """

    @abstractmethod
    def send(self, serial: int, command: Command, arguments: Mapping[int, Any], frames: SharedArrays | None) -> None:
        """Ask for a command in some of its environments; one answer comes for each.

        Raises:
            ConnectionError: the worker has died.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the process at once and free what belongs to it. May be called twice."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait for the process's own end, at most so long. Its connection is closed."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the process is known to live on, for one that says nothing."""

    @abstractmethod
    def why_gone(self, hung: bool) -> str:
        """What happened to a process that hangs, or has closed its connection, and the end of its log."""

    @abstractmethod
    def log_tail(self) -> str:
        """The end of what it printed, as a sentence."""

    def restart(self, hung_seconds: float | None = None, problem: str = "") -> None:
        """Kill what is left of the process, say why, and start it anew.

        Raises:
            RuntimeError: it failed MAX_FAILURES times with no completed step in between.
        """
        why = f"{problem}{self.log_tail()}" if problem else self.why_gone(hung=hung_seconds is not None)
        if hung_seconds is not None:
            option = f" ({self.timeout_option})" if self.timeout_option else ""
            why = f"gave no answer for {hung_seconds:.0f} s{option} and was killed.{why}"
        self.failures += 1
        self.kill()
        message = f"{self.name} (environments {self.env_ids}) {why}"
        if self.failures >= MAX_FAILURES:
            raise RuntimeError(f"{message}\nIt failed {self.failures} times without completing a step; giving up.")
        log.warning("%s\nIts running episodes are lost; it is started again.", message)
        self.start()


class ChildWorker(Worker):
    """A worker that is our child process, with its stdout and stderr in a file without a name."""

    process: subprocess.Popen[bytes]
    log_fd: int = -1

    def kill(self) -> None:
        if self.process.poll() is None:
            self.end_process()
        self.process.wait()
        self.connection.close()
        if self.log_fd >= 0:
            os.close(self.log_fd)
        self.log_fd = -1

    def end_process(self) -> None:
        """SIGKILL for it (and, where it leads a group, for what it has started)."""
        self.process.kill()

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def alive(self) -> bool:
        return self.process.poll() is None

    def why_gone(self, hung: bool) -> str:
        if hung:
            return self.hang_trace()
        return f"{self.exit_reason()}.{self.log_tail()}"

    def exit_reason(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"died with exit code {code}{name}"

    def hang_trace(self) -> str:
        """Where a hung worker is: its Python stacks, as it prints them itself on SIGUSR1."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        return self.log_tail()

    def log_tail(self) -> str:
        size = os.fstat(self.log_fd).st_size
        text = os.pread(self.log_fd, _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
        return f" The end of its log (stdout and stderr):\n{text}" if text else " It printed nothing."


def observation_layout(spec: EnvSpec, *lead: int) -> Layout:
    """Shared memory for one observation per element of the leading shape."""
    layout: Layout = {f"image.{c}": ((*lead, *spec.image_size, 3), "uint8") for c in spec.cameras}
    return {**layout, "state": ((*lead, spec.state_dim), "float32")}


@dataclass
class _UnderWay:
    """A call to some environments.

    Attributes:
        pending: worker -> environments that it owes an answer for. sent: the last time that something was, in seconds.
    """

    command: Command
    env_ids: set[int]
    pending: dict[Worker, set[int]] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    sent: float = 0.0


class PoolVecEnv(BaseVecEnv):
    """Environments in workers. A kind of it starts its workers, hands them over, and reads their answers."""

    def __init__(self, spec: EnvSpec, num_envs: int, record_frames: bool, workers: Sequence[Worker]) -> None:
        super().__init__(spec, num_envs, record_frames)
        self._serial = 0
        self._calls: dict[int, _UnderWay] = {}  # by serial
        self._workers = workers
        self._frames: SharedArrays | None = None
        self._broken_steps: dict[int, int] = {}  # environment -> broken steps since its last completed one
        self._finalizer = weakref.finalize(self, shut_down, workers)  # also at interpreter exit

    @abstractmethod
    def _expand(self, command: Command, env_id: int, payload: Any) -> Any:
        """A worker's answer as `SingleEnv` gave it."""

    def close(self) -> None:
        """End the workers and free the shared memory. May be called twice."""
        self._finalizer()
        if self._frames is not None:
            self._frames.close()

    def ask(self, command: Command, arguments: Mapping[int, Any]) -> dict[int, Any]:
        """Ask for what changes no environment; a worker that breaks is asked again.

        Raises:
            RuntimeError: one broke too often.
        """
        answers = self._call(command, arguments)
        while missing := {i: argument for i, argument in arguments.items() if i not in answers}:
            answers |= self._call(command, missing)
        return answers

    def _call(self, command: Command, arguments: Mapping[int, Any]) -> dict[int, Any]:
        assert self._finalizer.alive, "the environment is closed"
        if command == "step" and self.record_frames and arguments:
            self._reserve_frames(max(len(chunk) for chunk in arguments.values()))
        if command == "reset":  # A step that nobody waits for any more, as after Ctrl-C, is given up.
            self._calls = {n: call for n, call in self._calls.items() if not call.env_ids & arguments.keys()}
        self._serial += 1  # answers to a call that was given up are thrown away
        call = _UnderWay(command, set(arguments))
        self._calls[self._serial] = call
        self._send_all(self._serial, call, arguments)
        return self._wait(self._serial, call)

    def _wait(self, serial: int, call: _UnderWay) -> dict[int, Any]:
        """Wait for a call's answers; those to other calls that come meanwhile are noted there."""
        try:
            while call.pending:
                self._listen(call)
        finally:
            self._calls.pop(serial, None)
        if call.errors:
            raise call.errors[0]
        return call.answers

    def _listen(self, call: _UnderWay) -> None:
        """Take what the call's workers say; replace those that died, or were silent for too long."""
        timeout, deadline = dict[Worker, float](), dict[Worker, float]()
        for worker in call.pending:  # It is busy with the oldest call that it owes an answer to.
            busy = next((each for each in self._calls.values() if worker in each.pending), call)
            longest = max(worker.step_timeout, worker.start_timeout)
            timeout[worker] = longest if busy.command == "reset" else worker.step_timeout
            deadline[worker] = max(busy.sent, worker.heard) + timeout[worker]
        wait = min(LOOK_SECONDS, max(0.0, min(deadline.values()) - time.monotonic()))
        speaking = mp_connection.wait(cast(list[int], [worker.connection for worker in call.pending]), wait)
        for worker in list(call.pending):
            if worker.connection in speaking:
                self._hear(worker)
            elif time.monotonic() > deadline[worker]:
                self._replace(worker, hung_seconds=timeout[worker])
            elif not speaking and not worker.alive():  # its socket may live on in a process that it started
                self._replace(worker)

    def _hear(self, worker: Worker) -> None:
        """Note one answer with the call that asked for it."""
        worker.heard = time.monotonic()
        try:
            serial, env_id, status, payload = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            said = str(error) and not getattr(error, "errno", None)  # ours, and not the system's "reset by peer"
            self._replace(worker, problem=f"{error}." if said else "")
            return
        call = self._calls.get(serial)
        if call is None:
            return
        if env_id not in call.pending.get(worker, ()):
            self._replace(worker, problem=f"answered for environment {env_id!r}, unasked.")
            return
        if status == "ok":
            call.answers[env_id] = self._expand(call.command, env_id, payload)
            if call.command in ("step", "move_bodies"):
                worker.failures = self._broken_steps[env_id] = 0
        elif status == "broken":
            self._note_broken_step(worker, env_id, payload)
        else:
            call.errors.append(_caller_error(status, payload, worker, env_id))
        call.pending[worker].discard(env_id)
        if not call.pending[worker]:
            del call.pending[worker]

    def _note_broken_step(self, worker: Worker, env_id: int, text: str) -> None:
        """An environment failed in its step, and its process lives: only this episode is lost.

        Raises:
            RuntimeError: it failed MAX_FAILURES times with no completed step in between.
        """
        self._broken_steps[env_id] = count = self._broken_steps.get(env_id, 0) + 1
        message = f"environment {env_id} ({worker.name}) failed in a step:\n{text}"
        if count >= MAX_FAILURES:
            raise RuntimeError(f"{message}\nIt failed {count} times without completing a step; giving up.")
        log.warning("%s\nIts episode is lost.", message)

    def _send_all(self, serial: int, call: _UnderWay, arguments: Mapping[int, Any]) -> None:
        """Send each worker its part, and note the environments that it owes an answer for."""
        for worker in sorted(self._workers, key=lambda w: not w.ready):  # a restarted one delays no other
            part = {i: arguments[i] for i in worker.env_ids if i in arguments}
            if not part:
                continue
            worker.wait_ready()
            try:
                worker.send(serial, call.command, part, self._frames)
                call.pending[worker] = set(part)
            except ConnectionError:
                self._replace(worker)
        call.sent = time.monotonic()

    def _replace(self, worker: Worker, hung_seconds: float | None = None, problem: str = "") -> None:
        """Restart a broken worker. What it answered in calls under way is void: its environments are gone."""
        for call in self._calls.values():
            call.pending.pop(worker, None)
            for i in worker.env_ids:
                call.answers.pop(i, None)
        self._mark_broken(worker.env_ids)
        worker.restart(hung_seconds, problem)

    def _reserve_frames(self, num_steps: int) -> None:
        """Memory for the frames of `num_steps` control steps, which workers attach before their next command."""
        if self._frames is not None:
            if self._frames["state"].shape[1] >= num_steps:
                return
            for call in list(self._calls.values()):  # Their workers write into what is there.
                while call.pending:
                    self._listen(call)
            self._frames.close()
        self._frames = SharedArrays(observation_layout(self.spec, self.num_envs, num_steps))

    def _read(self, shared: SharedArrays, env_id: int, instruction: str) -> SingleObservation:
        """The observation in shared memory, as views."""
        images = {camera: shared[f"image.{camera}"][env_id] for camera in self.spec.cameras}
        return SingleObservation(images, shared["state"][env_id], instruction)

    def _read_step(self, shared: SharedArrays, env_id: int, instruction: str, outcome: Sequence[Any]) -> ChunkResult:
        """A step's result with its observation, and the frames (copies), in shared memory."""
        result = ChunkResult(self._read(shared, env_id, instruction), *outcome)
        if self.record_frames:
            assert self._frames is not None, "memory for frames is reserved before the step"
            rows = slice(0, result.num_steps)
            result.frames = {c: self._frames[f"image.{c}"][env_id, rows].copy() for c in self.spec.cameras}
            result.states = self._frames["state"][env_id, rows].copy()
        return result


def assign(num_envs: int, num_workers: int) -> list[list[int]]:
    """Environment ids of each worker, assigned in turn; no worker without any."""
    count = min(num_workers, num_envs)
    return [list(range(i, num_envs, count)) for i in range(count)]


def start_all(workers: Sequence[Worker]) -> None:
    """Start them side by side and wait until all are ready; where one cannot, end all.

    Raises:
        RuntimeError: a worker cannot start; with its own error text.
    """
    started: list[Worker] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        for worker in workers:
            worker.wait_ready()
    except BaseException:
        shut_down(started)
        raise


def shut_down(workers: Sequence[Worker]) -> None:
    """Close every connection, which ends the workers; kill those that take too long."""
    deadline = time.monotonic() + CLOSE_SECONDS
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()


def _caller_error(name: str, text: str, worker: Worker, env_id: int) -> Exception:
    if name in CALLER_ERRORS:
        return CALLER_ERRORS[name](text)
    return RuntimeError(f"environment {env_id} ({worker.name}) failed:\n{text}")
