"""A worker process of `sim.vector.processes`: holds some of the environments and runs what the parent asks.

Started as `python -m sim.vector.worker SOCKET_FD PARENT_PID`, not forked and not by multiprocessing's spawn:
so GL and thread state are never inherited, and the user's script is not imported a second time.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from sim.rendering.devices import render_here
from sim.single_env import ChunkResult, SingleEnv, SingleObservation
from sim.vector.body import EmbodiedEnv, SimulatedBody
from sim.vector.commands import CALLER_ERRORS, Command, Layout, SharedArrays, SimOptions, run_command


def main(fd: int, parent: int) -> None:
    """Serve until the parent closes its end of the socket, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a hung worker where it hangs
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(fd)
    try:
        worker = _start(connection)
        if worker is not None:
            worker.serve()
    except (EOFError, ConnectionError):
        pass  # the parent has closed its end


def _exit_with_parent(parent: int) -> None:
    """For a parent that was killed while this process is busy, or whose forks hold the socket open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def reason(error: Exception) -> str:
    """What the parent shows: the message of an error class of ours, which was written for people; else a traceback."""
    ours = type(error).__module__.partition(".")[0] in ("sim", "vla_rl")
    return str(error) if ours else "".join(traceback.format_exception(error))


def _start(connection: Connection) -> _Worker | None:
    """Make the environments, and tell the parent "ready", or "failed" with the error's text."""
    setup = connection.recv()
    shared = SharedArrays(setup["layout"], reduction.recv_handle(connection))
    envs: dict[int, SingleEnv] = {}
    try:
        module, _, name = setup["config_class"].partition(":")
        config_class = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        config: SimOptions = config_class.model_validate_json(setup["config"])
        render_here(config.render_devices, *setup["place"])
        for env_id in setup["env_ids"]:
            envs[env_id] = config.start(setup["record_frames"])
    except Exception as error:  # process edge: the parent raises it
        connection.send(("failed", reason(error)))
        return None
    connection.send(("ready", ""))
    return _Worker(connection, envs, shared)


class _Worker:
    """Answers commands. Images and states go through shared memory, everything else through the socket."""

    def __init__(self, connection: Connection, envs: dict[int, SingleEnv], shared: SharedArrays) -> None:
        self.connection = connection
        self.envs = envs
        self.bodies = {i: SimulatedBody(cast(EmbodiedEnv, env)) for i, env in envs.items()}
        self.shared = shared
        self.frames: SharedArrays | None = None

    def serve(self) -> None:
        while True:
            serial, command, arguments = self.connection.recv()
            if command == "frames":
                self._attach_frames(arguments)
                continue
            for env_id, argument in arguments.items():
                self.connection.send((serial, env_id, *self._answer(env_id, command, argument)))

    def _attach_frames(self, layout: Layout) -> None:
        if self.frames is not None:
            self.frames.close()
        self.frames = SharedArrays(layout, reduction.recv_handle(self.connection))

    def _answer(self, env_id: int, command: Command, argument: Any) -> tuple[str, Any]:
        """("ok", answer) or (name of the error, its text)."""
        try:
            if command == "begin_bodies":
                return "ok", self.bodies[env_id].begin(argument)
            if command == "move_bodies":
                return "ok", self.bodies[env_id].step(*argument)
            answer = run_command(self.envs[env_id], command, argument)
            if command == "reset":
                return "ok", self._show(env_id, answer)
            return "ok", self._shrink(env_id, answer) if command == "step" else answer
        except Exception as error:  # process edge: the parent raises it
            name = type(error).__name__
            return name, str(error) if name in CALLER_ERRORS else reason(error)

    def _show(self, env_id: int, obs: SingleObservation) -> str:
        """Write the observation to shared memory; what is left is the instruction."""
        for camera, image in obs.images.items():
            self._write(self.shared[f"image.{camera}"][env_id], image, f"image of camera {camera!r}")
        self._write(self.shared["state"][env_id], obs.state, "state")
        return obs.instruction

    @staticmethod
    def _write(target: np.ndarray, value: np.ndarray, what: str) -> None:
        found, expected = (value.shape, value.dtype), (target.shape, target.dtype)
        assert found == expected, f"{what}: the environment gave {found}, its EnvSpec says {expected}"
        target[...] = value

    def _shrink(self, env_id: int, result: ChunkResult) -> tuple:
        """Write observation and frames to shared memory; what is left is small."""
        instruction = self._show(env_id, result.obs)
        if result.states is not None:
            assert self.frames is not None, "the parent announces memory for frames before the first step"
            self.frames["state"][env_id, : result.num_steps] = result.states
            for camera, frames in result.frames.items():
                self.frames[f"image.{camera}"][env_id, : result.num_steps] = frames
        ends = (result.terminated, result.truncated, result.num_steps, result.success)
        return instruction, result.reward, *ends, result.objects


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
