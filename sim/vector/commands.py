"""The commands of a vector runner to an environment, the shared memory of its answers, and the options that it reads.

Shared-memory arrays by name.

The memory has no name in the file system, so nothing of it can be left behind, whatever kills the
processes, and it does not count against the size of /dev/shm, which is small in containers.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from sim.rendering.devices import Asked
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.types import EnvSpec

Command = Literal[
    "reset",
    "step",
    "save_state",
    "expert_action",
    "expert_remaining",
    "drive_home",
    "begin_bodies",
    "move_bodies",
]

# Errors of a caller's, which are raised again in the caller's process.
CALLER_ERRORS = {error.__name__: error for error in (ValueError, NotImplementedError)}


class SimOptions(Protocol):
    """The part of `sim.base.SimConfig` that vector runners use."""

    step_timeout: ClassVar[float]

    @property
    def num_workers(self) -> int: ...
    @property
    def render_devices(self) -> Asked: ...
    def env_spec(self) -> EnvSpec: ...
    def start(self, record_frames: bool = False) -> SingleEnv: ...
    def model_dump_json(self) -> str: ...


def run_command(env: SingleEnv, command: Command, argument: Any) -> Any:
    """One command of `BaseVecEnv._call` in one environment."""
    match command:
        case "reset":
            env.succeeded_at, env.is_over = None, False
            return _begun(env, env.reset(argument), argument.keyframe is None)
        case "step":
            return env.run_chunk(argument)
        case "save_state":
            return env.save_state()
        case "expert_action":
            return env.expert_action()
        case "expert_remaining":
            return env.expert_remaining()
        case "drive_home":
            return env.drive_home()
        case "begin_bodies" | "move_bodies":
            raise AssertionError("a worker asks its simulated bodies")


def _begun(env: SingleEnv, obs: SingleObservation, is_new: bool) -> SingleObservation:
    """What `reset` returned, checked against what the environment says of itself; many are written by users.

    Raises:
        ValueError: an image or the state is missing or of another type or shape, or `reset` has not set its counts.
    """
    of, spec = f"environment {env.spec.kind}: its reset", env.spec
    if not isinstance(obs, SingleObservation):
        raise ValueError(f"{of} returned {type(obs).__name__}, not a SingleObservation; end it with self.observe()")
    for camera in spec.cameras:
        if camera not in obs.images:
            raise ValueError(f"{of} shows no camera {camera!r}, but {', '.join(obs.images) or 'none'}; see env.cameras")
        image, expected = np.asarray(obs.images[camera]), (*spec.image_size, 3)
        if image.dtype != np.uint8 or image.shape != expected:
            raise ValueError(
                f"{of} shows {camera} as {image.dtype} {image.shape}; its env_spec says images of uint8 {expected}"
            )
    if np.shape(obs.state) != (spec.state_dim,):
        raise ValueError(f"{of} shows a state of shape {np.shape(obs.state)}; its env_spec says ({spec.state_dim},)")
    if env.horizon < 1 or (is_new and env.num_steps):
        raise ValueError(
            f"{of} left num_steps at {env.num_steps} and horizon at {env.horizon}; it must set num_steps to 0 and "
            "horizon to the task's"
        )
    return obs


# array name -> (shape, dtype name)
Layout = dict[str, tuple[tuple[int, ...], str]]

_ALIGN = 64


class SharedArrays:
    """One block of anonymous shared memory, cut into arrays by `layout`.

    The creator leaves `fd` out; another process attaches with the file descriptor it was sent
    (`multiprocessing.reduction.send_handle`). New memory is zero.
    """

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        self.layout = layout
        self.offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in layout.items():
            self.offsets[name] = size
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self.size = max(size, _ALIGN)
        self.fd = _anonymous_file(self.size) if fd is None else fd
        self._finalizer = weakref.finalize(self, os.close, self.fd)  # also where nobody closes it
        memory = mmap.mmap(self.fd, self.size)
        self._arrays = {
            name: np.ndarray(shape, dtype, buffer=memory, offset=self.offsets[name])
            for name, (shape, dtype) in layout.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def close(self) -> None:
        """Let go of the memory; the system frees it when the last process has, and no array is in use."""
        self._arrays = {}
        self._finalizer()
        self.fd = -1


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vla-rl")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
