"""Cameras on this machine, without ROS: OpenCV's (USB, network) and RealSense, through LeRobot's camera classes.

LeRobot's classes read in a thread of their own and keep the newest frame. Here a second one waits for each new frame,
and hands it on stamped with the time at which it was taken, so that a camera that hangs or is unplugged shows in the
age of its pictures, as a topic does. It is opened anew until it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from real_robot.contract.channels import CameraConfig
from real_robot.transports.base import Handler, TransportError
from real_robot.transports.lerobot_devices import DeviceError, let_go
from real_robot.transports.messages import Image

_log = logging.getLogger(__name__)
_HANGS = "no frame comes"
_WAIT = 0.2  # seconds for a frame, between looks whether to close
_AGAIN = 1.0  # seconds between attempts to open a camera that is gone


class Camera(Protocol):
    """An open camera, whose pictures go to a handler."""

    @property
    def fault(self) -> str | None:
        """Why it cannot be relied on now, or None."""
        ...

    def close(self) -> None: ...


class LocalCamera:
    """Delivers each new frame of a camera as an `Image`, on its own thread, until closed.

    Raises:
        TransportError: it cannot be opened, or gives no frame.
    """

    def __init__(self, name: str, config: CameraConfig, handler: Handler) -> None:
        self._name, self._config, self._handler = name, config, handler
        self._closing = threading.Event()
        self._silent_since: float | None = None
        self._why = ""
        try:
            self._device = self._open()
        except DeviceError as error:
            raise TransportError(f"camera {name} ({config.place}): {error}") from error
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str | None:
        since = self._silent_since
        if since is None or time.monotonic() - since < self._config.patience:
            return None
        return f"camera {self._name} ({self._config.place}): {self._why}"

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5.0)

    def _open(self) -> Any:
        """
        Raises:
            DeviceError: it does not open, or gives no frame.
        """
        device = self._config.make()
        try:
            device.connect()
        except Exception as error:  # A driver's own; whatever it is, the camera cannot be used.
            let_go(device)
            find = f"lerobot-find-cameras {self._config.kind}"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DeviceError(f"cannot be opened: {reason} ({find} lists those that are there)") from error
        return device

    def _run(self) -> None:
        device = self._device
        while not self._closing.is_set():
            try:
                if device is None:
                    device = self._open()
                    _log.warning("camera %s is back", self._name)
                self._deliver(device.async_read(timeout_ms=_WAIT * 1e3), device.latest_timestamp)
                self._silent_since = None
            except TimeoutError:
                self._is_silent(_HANGS)
            except Exception as error:  # A driver's own, with its cable pulled for instance.
                self._is_silent(" ".join(str(error).split())[:200] or type(error).__name__)
                if device is not None:
                    let_go(device)
                device = None
                self._closing.wait(_AGAIN)
        if device is not None and self._silent_since is not None and self._why == _HANGS:
            # Its read does not return; OpenCV crashes when a camera is released under it. It ends with the process.
            _log.warning("camera %s hangs, and is not closed", self._name)
        elif device is not None:
            let_go(device)

    def _is_silent(self, why: str) -> None:
        self._why = why
        if self._silent_since is None:
            self._silent_since = time.monotonic()

    def _deliver(self, frame: Any, taken: float | None) -> None:
        """`taken`: seconds of `perf_counter`, as LeRobot has them."""
        picture = np.asarray(frame)
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise DeviceError(f"a frame of {picture.dtype} {picture.shape}; colors of 8 bits are read")
        age = 0.0 if taken is None else max(0.0, time.perf_counter() - taken)
        height, width = picture.shape[:2]
        data = np.ascontiguousarray(picture).tobytes()
        stamp = time.time_ns() - round(age * 1e9)
        self._handler(Image(stamp=stamp, height=height, width=width, encoding="rgb8", step=3 * width, data=data))


OpenCamera = Callable[[str, CameraConfig, Handler], Camera]
