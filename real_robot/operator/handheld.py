"""What a person holds in the hand, through LeRobot's teleoperators: a phone's pose as axes, a pad that is still there.

LeRobot's classes keep what a device said last. A phone out of the network, or a pad without its cable, would go on
pressing: here it is at rest.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from real_robot.contract.teleop import DeviceConfig
from real_robot.operator.teleop import Axes, GripperCommand
from real_robot.transports.lerobot_devices import DeviceError, connect_device

PHONE_SILENCE = 0.25  # seconds without another pose; a hand is never that still
PHONE_PATIENCE = 120.0  # seconds in which a person connects the phone, and presses once
DEAD_ZONE = 0.1  # of full deflection, around where it was pressed
LOOK_EVERY = 0.5  # seconds between two looks whether a pad is still there
PRESSED = 0.5  # of an analog input


class PhoneAxes:
    """A phone as a stick: while pressed, the further from where it was pressed, the faster, along and about each axis.

    Args:
        reach, turn: meters and radians from there that are full deflection.
    """

    def __init__(self, reach: float, turn: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reach, self._turn, self._clock = reach, turn, clock
        self._pressed_at: Any = None  # the rotation when it was pressed; None: not pressed
        self._seen: tuple[bytes, float] = (b"", float("-inf"))
        self._lost = False

    def read(self, action: Mapping[str, Any]) -> Axes | None:
        """What LeRobot's phone says; None where it is not pressed, or has said nothing new.

        One that fell silent while it was pressed counts only once it has been let go.
        """
        if not action or not action["phone.enabled"]:
            self._pressed_at, self._lost = None, False
            return None
        now = self._clock()
        position, rotation = np.asarray(action["phone.pos"], np.float64), action["phone.rot"]
        seen = position.tobytes() + np.asarray(rotation.as_quat()).tobytes()
        if seen != self._seen[0]:
            self._seen = (seen, now)
        self._lost = self._lost or now - self._seen[1] > PHONE_SILENCE
        if self._lost:
            return None
        if self._pressed_at is None:
            self._pressed_at = rotation
        x, y, z = position / self._reach
        turned = np.asarray((rotation * self._pressed_at.inv()).as_rotvec()) / self._turn
        # LeRobot's MapPhoneActionToRobotAction has the phone's frame so to the robot's.
        values = np.array([-y, x, z, turned[1], turned[0], -turned[2]])
        values = np.where(np.abs(values) < DEAD_ZONE, 0.0, np.clip(values, -1, 1))
        return Axes(values.astype(np.float32), phone_gripper(action["phone.raw_inputs"]))


def phone_gripper(inputs: Mapping[str, Any]) -> GripperCommand | None:
    """Android's button A opens and B closes; on iOS the slider a3 does, up and down."""
    wanted = float(inputs.get("reservedButtonA", 0)) - float(inputs.get("reservedButtonB", 0))
    wanted += float(inputs.get("a3", 0.0))
    return "open" if wanted > PRESSED else "close" if wanted < -PRESSED else None


def connect_phone(device: Any, config: DeviceConfig) -> None:
    """Connect LeRobot's phone, which waits for the person to press once.

    Raises:
        DeviceError: nobody did, or its server or app cannot be reached.
    """
    failure: list[DeviceError] = []

    def connect() -> None:
        try:
            connect_device(device, config.teleoperator, "")
        except DeviceError as error:
            failure.append(error)

    thread = threading.Thread(target=connect, name="phone", daemon=True)
    thread.start()
    thread.join(PHONE_PATIENCE)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise DeviceError(
            f"phone: it was not pressed within {PHONE_PATIENCE:g} s. Android: open https://THIS-MACHINE:4443 in Chrome "
            "and touch the page; iOS: open HEBI Mobile I/O in the same network and hold B1 "
            "(teleop.device.settings.phone_os)"
        )


class PadPresence:
    """Whether LeRobot's gamepad is still plugged in. Called with each reading; looks now and then.

    Raises:
        DeviceError: there is none. Of a radio pad only the dongle is seen.
    """

    def __init__(self, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._pad, self._clock = device.gamepad, clock
        self._looked = float("-inf")
        self._is_there = True

    def check(self) -> None:
        """
        Raises:
            DeviceError: see the class.
        """
        now = self._clock()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._is_there = bool(self._pad.running) and self._is_plugged_in()
        if not self._is_there:
            raise DeviceError(
                "gamepad: none is plugged in, or this user may not read it (/dev/input). LeRobot takes the first that "
                "pygame finds; where it finds none: teleop.device.settings.hidapi_fallback=true"
            )

    def _is_plugged_in(self) -> bool:
        info = getattr(self._pad, "device_info", None)
        if info is None:  # pygame's; LeRobot's reading has handled its events just before.
            return sys.modules["pygame"].joystick.get_count() > 0
        known = sys.modules["hid"].enumerate(info["vendor_id"], info["product_id"])
        return any(each["path"] == info["path"] for each in known)
