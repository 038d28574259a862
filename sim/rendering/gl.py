"""Offscreen GL contexts, one per process, messages where they fail, and the segmentation and depth of a picture."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from sim.rendering.devices import RenderError, backend, check_backend, note_opened
from vla_rl.data.segmentation import BACKGROUND, FIRST_THING, MAX_ID, TABLE, pack

ARM, GRIPPER = FIRST_THING, FIRST_THING + 1
_TABLES = ("table", "counter", "desk")


@dataclass
class _Shared:
    """The one context: a forked copy of the process cannot use it. `address` is None unless it is EGL's."""

    process: int
    context: Any
    address: int | None


_shared: _Shared | None = None


def open_context(width: int, height: int) -> Any:
    """A new GL context, current in this thread. EGL uses the device of MUJOCO_EGL_DEVICE_ID.

    Raises:
        RenderError: no context can be opened.
    """
    check_backend()
    os.environ.setdefault("LP_NUM_THREADS", "1")  # Mesa in software: the workers fill the cores already
    note_opened()
    try:
        context = importlib.import_module(f"mujoco.{backend()}").GLContext(width, height)
        context.make_current()
    except (ImportError, RuntimeError, AttributeError, OSError, mujoco.FatalError) as error:
        raise RenderError(advice(error)) from error
    return context


@contextlib.contextmanager
def current() -> Iterator[None]:
    """Within, this process's one shared GL context is current in this thread; it is opened the first time.

    Another library's renderer in the same process (robosuite's own, say) expects that its context stays current, so
    with EGL that one is made current again afterwards, or none where there was none: a renderer that is freed deletes
    what has its numbers in whatever context is current. For that reason no garbage is collected meanwhile either.

    Raises:
        RenderError: no context can be opened, or this process was forked from one that had rendered.
    """
    global _shared  # noqa: PLW0603  one per process is the point
    if _shared is not None and _shared.process != os.getpid():
        raise RenderError(
            "cannot render: this process was forked from one that had already rendered, and GL does not survive "
            "a fork. Start worker processes with multiprocessing's 'spawn' method."
        )
    before = _current_egl()
    if _shared is None:
        context = open_context(64, 64)
        _shared = _Shared(os.getpid(), context, _address(_current_egl()))
        atexit.register(_close)  # left to the interpreter's end, freeing complains of modules already gone
    elif _shared.address is None or _address(before) != _shared.address:
        _shared.context.make_current()
    is_other = _address(before) != _shared.address
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_other:
            _put_back(before)
        if collects:
            gc.enable()


class ForeignContext:
    """The EGL context of another library's renderer, which expects that the one it has opened stays current.

    With several of these in one process each would draw in the last one's, and show wrong pictures.
    """

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within, the context that was opened within before is current."""
        if self._own is not None:
            sys.modules["OpenGL.EGL"].eglMakeCurrent(*self._own)
        before = _address(_current_egl())
        try:
            yield
        finally:
            after = _current_egl()
            if _address(after) != before:
                self._own = after


def at_exit(free: Callable[[], None]) -> None:
    """Have what was uploaded freed before the context goes, at the interpreter's end."""

    def run() -> None:
        try:
            with current():
                free()
        except _gl_errors():  # another library has closed the display already, and all in it
            free()

    atexit.register(run)


def _close() -> None:
    assert _shared is not None, "registered when it was opened"
    try:
        _shared.context.free()
    except _gl_errors():  # as above; else it is freed again when it is deleted
        vars(_shared.context)["_context"] = None


def _gl_errors() -> tuple[type[Exception], ...]:
    errors = sys.modules.get("OpenGL.error")
    return () if errors is None else (errors.GLError,)


def _current_egl() -> tuple[Any, Any, Any, Any] | None:
    """EGL's display, two surfaces and context that are current in this thread, if any."""
    egl = sys.modules.get("OpenGL.EGL")  # whoever has a context here has loaded it
    if backend() != "egl" or egl is None or not (context := egl.eglGetCurrentContext()):
        return None
    surfaces = (egl.eglGetCurrentSurface(which) for which in (egl.EGL_DRAW, egl.EGL_READ))
    return egl.eglGetCurrentDisplay(), *surfaces, context


def _address(current: tuple[Any, Any, Any, Any] | None) -> int | None:
    return None if current is None else current[3].address


def _put_back(before: tuple[Any, Any, Any, Any] | None) -> None:
    """Make what was current before current again; if that was nothing, nothing."""
    egl = sys.modules["OpenGL.EGL"]
    nothing = (egl.eglGetCurrentDisplay(), egl.EGL_NO_SURFACE, egl.EGL_NO_SURFACE, egl.EGL_NO_CONTEXT)
    egl.eglMakeCurrent(*(before or nothing))


def advice(error: BaseException) -> str:
    """The message of a RenderError caused by `error`."""
    return (
        f"cannot render: opening an offscreen GL context with {backend()} failed "
        f"(MUJOCO_GL={os.environ.get('MUJOCO_GL', 'unset')}; {type(error).__name__}: {error}). "
        "On Debian or Ubuntu install EGL with Mesa: "
        "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri, and use MUJOCO_GL=egl; "
        "or OSMesa: apt-get install -y libosmesa6, and use MUJOCO_GL=osmesa."
    )


def draw_structure(
    model: mujoco.MjModel, scene: mujoco.MjvScene, viewport: mujoco.MjrRect, context: mujoco.MjrContext, ids: np.ndarray
) -> np.ndarray:
    """The structure of a scene that was just updated, as `vla_rl.data.segmentation.pack` gives it, bottom row first.

    Args:
        ids: uint8 (ngeom,), what each geom is part of.
    """
    flags, depth_map = scene.flags.copy(), context.readDepthMap
    scene.flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = scene.flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = 1
    context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
    drawn = np.full(scene.ngeom + 1, BACKGROUND, np.uint8)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.objtype != mujoco.mjtObj.mjOBJ_GEOM or geom.rgba[3] == 0:
            geom.segid = -1  # Not in the picture, but a segmentation would show it: sites, for one.
        elif geom.segid >= 0:
            drawn[geom.segid + 1] = ids[geom.objid]
    colors = np.empty((viewport.height, viewport.width, 3), np.uint8)
    nearness = np.empty((viewport.height, viewport.width), np.float32)
    try:
        mujoco.mjr_render(viewport, scene, context)
        mujoco.mjr_readPixels(colors, nearness, viewport, context)
    finally:
        scene.flags[:] = flags
        context.readDepthMap = depth_map
    numbers = colors.astype(np.int64) @ np.array([1, 256, 65536])
    near, far = (plane * model.stat.extent for plane in (model.vis.map.znear, model.vis.map.zfar))
    depth = near * far / (nearness.astype(np.float64) * (far - near) + near)
    return pack(drawn[numbers], depth)


def things(model: mujoco.MjModel) -> np.ndarray:
    """uint8 (ngeom,): what each geom of a robosuite scene is part of; every free or fixed object is a thing.

    The floor and the walls are the background.

    Raises:
        ValueError: more things than there are ids.
    """
    ids = np.full(model.ngeom, BACKGROUND, np.uint8)
    numbers: dict[int, int] = {}
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        root = int(model.body_rootid[body])
        names = [model.body(b).name.lower() for b in (root, body)]
        if any(word in name for name in [*names, model.geom(geom).name.lower()] for word in _TABLES):
            ids[geom] = TABLE
        elif body == 0 or root == 0 or any(word in names[0] for word in ("wall", "floor")):
            continue
        elif names[0].startswith(("robot", "mount", "base")) or names[1].startswith(("robot", "gripper", "mount")):
            ids[geom] = GRIPPER if names[1].startswith("gripper") else ARM
        else:
            number = numbers.setdefault(root, GRIPPER + 1 + len(numbers))
            if number > MAX_ID:
                raise ValueError(f"the scene has more than {MAX_ID - GRIPPER} things; a segmentation has no ids left")
            ids[geom] = number
    return ids
