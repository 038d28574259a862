"""Offscreen rendering: one GL context per process, one drawing context per image size, shared by all environments."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

MAX_GEOMS = 100


class RenderError(RuntimeError):
    """No image can be rendered on this machine; the message says what was tried and what to install."""


@dataclass
class _Shared:
    """This process's GL context and what hangs on it; `pid` tells a forked copy, which cannot use it."""

    pid: int
    gl: Any
    contexts: dict[int, mujoco.MjrContext]
    scene: mujoco.MjvScene


_shared: _Shared | None = None
_option = mujoco.MjvOption()
_option.geomgroup[:] = [1, 1, 0, 0, 0, 0]
_perturb = mujoco.MjvPerturb()


def _backend() -> str:
    """The GL back end asked for by MUJOCO_GL; EGL where that is unset and there is no display.

    Read here and not left to MuJoCo, which decides once, when it is first imported by anyone.
    """
    headless = sys.platform.startswith("linux") and not os.environ.get("DISPLAY")
    return os.environ.get("MUJOCO_GL", "").lower() or ("egl" if headless else "glfw")


def _open(model: mujoco.MjModel) -> _Shared:
    backend = _backend()
    if backend not in ("egl", "osmesa", "glfw"):
        raise RenderError(_advice(ValueError("not one of egl, osmesa, glfw")))
    os.environ.setdefault("LP_NUM_THREADS", "1")  # Mesa in software: images are small, workers fill the cores already
    try:
        gl = importlib.import_module(f"mujoco.{backend}").GLContext(256, 256)
        gl.make_current()
    except (ImportError, RuntimeError, AttributeError, OSError, mujoco.FatalError) as error:
        raise RenderError(_advice(error)) from error
    scene = mujoco.MjvScene(model, maxgeom=MAX_GEOMS)
    for flag in (
        mujoco.mjtRndFlag.mjRND_SHADOW,
        mujoco.mjtRndFlag.mjRND_REFLECTION,
        mujoco.mjtRndFlag.mjRND_SKYBOX,
        mujoco.mjtRndFlag.mjRND_FOG,
        mujoco.mjtRndFlag.mjRND_HAZE,
    ):
        scene.flags[flag] = 0
    return _Shared(os.getpid(), gl, {}, scene)


def _advice(error: BaseException) -> str:
    return (
        f"cannot render: opening an offscreen GL context with {_backend()} failed "
        f"(MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}; {type(error).__name__}: {error}). "
        "On Debian or Ubuntu install EGL with Mesa: "
        "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri, and use MUJOCO_GL=egl; "
        "or OSMesa: apt-get install -y libosmesa6, and use MUJOCO_GL=osmesa."
    )


def render(model: mujoco.MjModel, data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
    """The camera's view, uint8 (size, size, 3), upright RGB. Positions in `data` must be up to date.

    All models rendered in one process must have the same textures (`scene.mjcf` sees to that).

    Raises:
        RenderError: no GL context can be opened.
    """
    global _shared  # noqa: PLW0603  one per process is the point
    if _shared is None:
        _shared = _open(model)
    elif _shared.pid != os.getpid():
        raise RenderError(
            "cannot render: this process was forked from one that had already rendered, and GL does not survive "
            "a fork. Start worker processes with multiprocessing's 'spawn' method."
        )
    else:
        _shared.gl.make_current()
    context = _shared.contexts.get(size)
    if context is None:
        try:
            context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except mujoco.FatalError as error:
            raise RenderError(_advice(error)) from error
        mujoco.mjr_resizeOffscreen(size, size, context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
        _shared.contexts[size] = context
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED
    view.fixedcamid = camera
    mujoco.mjv_updateScene(model, data, _option, _perturb, view, mujoco.mjtCatBit.mjCAT_ALL, _shared.scene)
    viewport = mujoco.MjrRect(0, 0, size, size)
    mujoco.mjr_render(viewport, _shared.scene, context)
    image = np.empty((size, size, 3), np.uint8)
    mujoco.mjr_readPixels(image, None, viewport, context)
    return np.ascontiguousarray(image[::-1])
