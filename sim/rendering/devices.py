"""Rendering devices: GL back end, EGL devices, and their assignment to workers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BACKENDS = ("egl", "osmesa", "glfw")
DEVICE_VARIABLE = "MUJOCO_EGL_DEVICE_ID"
_OURS = "VLA_RL_RENDERING"  # names of the variables that were set here; a child process inherits them, and chooses anew
_MESA_VENDOR = Path("/usr/share/glvnd/egl_vendor.d/50_mesa.json")
_NVIDIA = Path("/dev/nvidiactl")
_MAX_DEVICES = 64
_EGL_EXTENSIONS, _EGL_DRM_DEVICE_FILE, _EGL_CUDA_DEVICE = 0x3055, 0x3233, 0x323A

Asked = Literal["auto", "cpu"] | tuple[int, ...]
_opened: str | None = None  # DEVICE_VARIABLE ("": unset) when a context was first opened here; None: not yet


class RenderError(RuntimeError):
    """No image can be rendered on this machine; the message says what was tried and what to install."""


def backend() -> str:
    """The GL back end asked for by MUJOCO_GL; EGL where that is unset and there is no display.

    Read here and not left to MuJoCo, which decides once, when it is first imported by anyone.
    """
    headless = sys.platform.startswith("linux") and not os.environ.get("DISPLAY")
    return os.environ.get("MUJOCO_GL", "").lower() or ("egl" if headless else "glfw")


def check_backend() -> None:
    """Refuse a MUJOCO_GL that is no back end of ours.

    Raises:
        RenderError: what it is, what is allowed, what to do.
    """
    if backend() not in BACKENDS:
        raise RenderError(
            f"MUJOCO_GL: got {os.environ.get('MUJOCO_GL')!r}, allowed: {', '.join(BACKENDS)}. Unset it (EGL is taken "
            "where there is no display), or export one of these; `vla-rl doctor` tries them."
        )


def note_opened() -> None:
    """A context is about to be opened: the process keeps the EGL device that it has now."""
    global _opened  # noqa: PLW0603  EGL opens one display a process
    if _opened is None:
        _opened = os.environ.get(DEVICE_VARIABLE, "")


@dataclass(frozen=True)
class EglDevice:
    """One EGL device: its number in MUJOCO_EGL_DEVICE_ID, CUDA's number if it is a GPU of NVIDIA's, and its kind."""

    number: int
    cuda: int | None = None
    software: bool = False
    file: str = ""

    def __str__(self) -> str:
        kind = f"CUDA GPU {self.cuda}" if self.cuda is not None else "software" if self.software else self.file or "GPU"
        return f"{self.number} ({kind})"


@dataclass(frozen=True)
class Place:
    """Where a process stands: worker `worker` of `num_workers` of one environment, in one of several ranks.

    local_rank: of the training process on its machine, None where it was not launched as one of several.
    visible: the numbers in CUDA_VISIBLE_DEVICES, None where it is unset or holds no plain numbers.
    """

    worker: int = 0
    num_workers: int = 1
    local_rank: int | None = None
    visible: tuple[int, ...] | None = None

    @classmethod
    def of(cls, worker: int, num_workers: int, environ: Mapping[str, str]) -> Place:
        """The place that a launcher's variables tell."""
        rank, text = environ.get("LOCAL_RANK", ""), environ.get("CUDA_VISIBLE_DEVICES")
        parts = [part.strip() for part in (text or "").split(",") if part.strip() not in ("", "-1")]
        numbers = tuple(map(int, parts)) if text is not None and all(map(str.isdecimal, parts)) else None
        return cls(worker, num_workers, int(rank) if rank.isdecimal() else None, numbers)


def choose_device(asked: Asked, devices: Sequence[EglDevice], place: Place) -> int | None:
    """The EGL device number for a process; None leaves the choice to MuJoCo, which takes the first that works.

    `auto`: the GPU of the process's own rank; where it is the only training process, the visible GPUs in turn over
    its workers. `cpu`: the software device. Numbers: in turn over the workers of all ranks.

    Raises:
        RenderError: a device that is not there; the message names those that are.
    """
    software = next((device.number for device in devices if device.software), None)
    if asked == "cpu":
        if software is None:
            raise RenderError(
                f"env.render_devices is cpu, and EGL has no software device here; there are: {_names(devices)}. "
                "On Debian or Ubuntu: apt-get install -y libegl-mesa0 libgl1-mesa-dri; or use MUJOCO_GL=osmesa."
            )
        return software
    if asked != "auto":
        missing = [number for number in asked if number not in {device.number for device in devices}]
        if missing:
            raise RenderError(
                f"env.render_devices: there is no EGL device {', '.join(map(str, missing))} here; "
                f"there are: {_names(devices)}. They are EGL's numbers, not CUDA's; auto matches the two."
            )
        return asked[((place.local_rank or 0) * place.num_workers + place.worker) % len(asked)]
    by_cuda = {device.cuda: device.number for device in devices if device.cuda is not None}
    if place.visible == ():  # the GPUs are hidden from this process: it shall not draw on them either
        return software
    # A container numbers its GPUs from 0, whatever CUDA_VISIBLE_DEVICES says of the machine.
    numbers = [cuda for cuda in place.visible or () if cuda in by_cuda] or sorted(by_cuda)
    if not numbers:
        return None
    return by_cuda[numbers[(place.worker if place.local_rank is None else place.local_rank) % len(numbers)]]


def _names(devices: Iterable[EglDevice]) -> str:
    return ", ".join(map(str, devices)) or "none"


def render_here(asked: Asked, worker: int = 0, num_workers: int = 1) -> None:
    """Have this process render where `env.render_devices` says. Call before it opens a GL context.

    With `auto`, a MUJOCO_EGL_DEVICE_ID that the user has set stays.

    Raises:
        RenderError: no such device, or this process renders on another one already.
    """
    for name in filter(None, os.environ.pop(_OURS, "").split(",")):
        os.environ.pop(name, None)
    egl = backend() == "egl"
    if not egl and isinstance(asked, tuple):
        raise RenderError(
            f"env.render_devices={list(asked)} are EGL devices, and MUJOCO_GL={backend()}: unset it or the option"
        )
    variables: dict[str, str] = {}
    if asked == "cpu":
        variables["LIBGL_ALWAYS_SOFTWARE"] = "1"
        if _MESA_VENDOR.is_file():
            variables["__EGL_VENDOR_LIBRARY_FILENAMES"] = str(_MESA_VENDOR)
        os.environ.update(variables)  # they decide which devices there are
    ask = egl and (asked != "auto" or (DEVICE_VARIABLE not in os.environ and _NVIDIA.exists()))
    if ask:
        chosen = choose_device(asked, list_devices(), Place.of(worker, num_workers, os.environ))
        if chosen is not None:
            variables[DEVICE_VARIABLE] = str(chosen)
            os.environ[DEVICE_VARIABLE] = str(chosen)
    if variables:
        os.environ[_OURS] = ",".join(variables)
    wanted = os.environ.get(DEVICE_VARIABLE, "")
    if egl and _opened not in (None, wanted):
        raise RenderError(
            f"this process renders on EGL device {_opened or '(the first)'} already, and cannot on "
            f"{wanted or 'another'} too: give its environments the same env.render_devices, or processes of their own "
            "(env.num_workers)"
        )


def list_devices() -> list[EglDevice]:
    """The EGL devices here, in EGL's order, which is MuJoCo's; none where there is no EGL. Loads libEGL."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    pointer, flag = ctypes.c_void_p, ctypes.c_uint
    query = _function(egl, b"eglQueryDevicesEXT", flag, ctypes.c_int, pointer, pointer)
    text_of = _function(egl, b"eglQueryDeviceStringEXT", ctypes.c_char_p, pointer, ctypes.c_int)
    value_of = _function(egl, b"eglQueryDeviceAttribEXT", flag, pointer, ctypes.c_int, pointer)
    if query is None or text_of is None or value_of is None:
        return []
    handles, count = (pointer * _MAX_DEVICES)(), ctypes.c_int()
    if not query(_MAX_DEVICES, handles, ctypes.byref(count)):
        return []
    found = []
    for number, handle in enumerate(handles[: count.value]):
        extensions = (text_of(handle, _EGL_EXTENSIONS) or b"").decode().split()
        cuda, file = ctypes.c_ssize_t(-1), b""
        if "EGL_NV_device_cuda" in extensions:
            value_of(handle, _EGL_CUDA_DEVICE, ctypes.byref(cuda))
        if "EGL_EXT_device_drm" in extensions:
            file = text_of(handle, _EGL_DRM_DEVICE_FILE) or b""
        is_software = "EGL_MESA_device_software" in extensions
        found.append(EglDevice(number, cuda.value if cuda.value >= 0 else None, is_software, file.decode()))
    return found


def _function(egl: ctypes.CDLL, name: bytes, result: type, *arguments: type):
    """A function of libEGL's by name; None where it does not have it."""
    address = egl.eglGetProcAddress(name)
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None
