"""Opening an offscreen GL context: one per process, and what to say when it fails."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import atexit
import importlib
import os
from typing import Any

import mujoco

from sim.gl_devices import RenderError, backend, note_opened

BACKENDS = ("egl", "osmesa", "glfw")
_shared: tuple[int, Any] | None = None  # (process id, context): a forked copy cannot use it


def open_context(width: int, height: int) -> Any:
    """A new GL context, current in this thread. EGL uses the device of MUJOCO_EGL_DEVICE_ID.

    Raises:
        RenderError: no context can be opened.
    """
    if backend() not in BACKENDS:
        raise RenderError(advice(ValueError(f"not one of {', '.join(BACKENDS)}")))
    os.environ.setdefault("LP_NUM_THREADS", "1")  # Mesa in software: the workers fill the cores already
    note_opened()
    try:
        context = importlib.import_module(f"mujoco.{backend()}").GLContext(width, height)
        context.make_current()
    except (ImportError, RuntimeError, AttributeError, OSError, mujoco.FatalError) as error:
        raise RenderError(advice(error)) from error
    return context


def make_current() -> None:
    """Make this process's one shared GL context current in this thread; opens it the first time.

    Raises:
        RenderError: no context can be opened, or this process was forked from one that had rendered.
    """
    global _shared  # noqa: PLW0603  one per process is the point
    if _shared is None:
        context = open_context(64, 64)
        _shared = (os.getpid(), context)
        atexit.register(context.free)  # left to the interpreter's end, freeing complains of modules already gone
    elif _shared[0] != os.getpid():
        raise RenderError(
            "cannot render: this process was forked from one that had already rendered, and GL does not survive "
            "a fork. Start worker processes with multiprocessing's 'spawn' method."
        )
    else:
        _shared[1].make_current()


def advice(error: BaseException) -> str:
    """The message of a RenderError caused by `error`."""
    return (
        f"cannot render: opening an offscreen GL context with {backend()} failed "
        f"(MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}; {type(error).__name__}: {error}). "
        "On Debian or Ubuntu install EGL with Mesa: "
        "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri, and use MUJOCO_GL=egl; "
        "or OSMesa: apt-get install -y libosmesa6, and use MUJOCO_GL=osmesa."
    )
