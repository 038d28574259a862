"""Messages from a browser to the console, read with bounds: anything else is refused with a reason."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from real_robot.operator.teleop import AXES, Axes

MAX_MESSAGE_BYTES = 4096
MAX_NAME = 64
BUTTONS = (
    "start", "hold", "resume", "take_over", "rewind", "recovery_done", "correction_done", "success", "failure",
    "demonstrate", "new_scene", "better", "worse",
)  # fmt: skip


class ConsoleError(ValueError):
    """A message that the console does not take; the text says why."""


@dataclass(frozen=True)
class Alive:
    """The page is there and seen. `sent`: the page's own clock, seconds."""

    sent: float


@dataclass(frozen=True)
class Seen:
    """How many status messages and pictures the page has taken in, so that no queue grows before a slow one."""

    statuses: int
    pictures: int


@dataclass(frozen=True)
class Drive:
    """What the person's hands do. `held`: something is pressed; else the robot holds."""

    axes: Axes
    held: bool
    sent: float


@dataclass(frozen=True)
class Press:
    """A button or its key. `sent`: the page's own clock, seconds."""

    button: str
    sent: float


@dataclass(frozen=True)
class Stop:
    """Emergency stop. Needs neither control nor token."""


@dataclass(frozen=True)
class Reset:
    """Motion is allowed again after a stop. `name`: who says so. `sent`: as of `Press`."""

    name: str
    sent: float


@dataclass(frozen=True)
class TakeControl:
    """This console wants to be the one that controls. `force`: also where another one has control (needs a token)."""

    name: str
    token: str
    force: bool


@dataclass(frozen=True)
class ReleaseControl:
    """This console gives control up."""


ConsoleMessage = Alive | Seen | Drive | Press | Stop | Reset | TakeControl | ReleaseControl


def read_object(data: str | bytes) -> dict[str, Any]:
    """
    Raises:
        ConsoleError: no JSON object, or too long.
    """
    if not isinstance(data, str) or len(data) > MAX_MESSAGE_BYTES:
        raise ConsoleError(f"a message is JSON text of at most {MAX_MESSAGE_BYTES} characters")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ConsoleError("a message is JSON; this is not") from None
    if not isinstance(message, dict):
        raise ConsoleError("a message is a JSON object")
    return message


def read_message(data: str | bytes) -> ConsoleMessage:
    """
    Raises:
        ConsoleError: not one of the messages above.
    """
    return message_of(read_object(data))


def message_of(message: dict[str, Any]) -> ConsoleMessage:
    """
    Raises:
        ConsoleError: not one of the messages above.
    """
    match message.get("type"):
        case "alive":
            return Alive(_number(message, "sent"))
        case "seen":
            return Seen(_count(message, "statuses"), _count(message, "pictures"))
        case "drive":
            return _drive(message)
        case "press":
            button = message.get("button")
            if button not in BUTTONS:
                raise ConsoleError(f"button: got {str(button)[:MAX_NAME]!r}, allowed: {', '.join(BUTTONS)}")
            return Press(button, _number(message, "sent"))
        case "stop":
            return Stop()
        case "reset":
            return Reset(_name(message), _number(message, "sent"))
        case "take_control":
            return TakeControl(_name(message), text_of(message, "token", 512), message.get("force") is True)
        case "release_control":
            return ReleaseControl()
        case other:
            raise ConsoleError(f"type: got {str(other)[:MAX_NAME]!r}")


def _drive(message: dict[str, Any]) -> Drive:
    told = message.get("axes")
    if not isinstance(told, dict) or not set(told) <= set(AXES):
        raise ConsoleError(f"axes: an object with some of {', '.join(AXES)}")
    values = np.array([_number(told, axis) if axis in told else 0.0 for axis in AXES], np.float64)
    gripper = message.get("gripper")
    if gripper not in (None, "open", "close"):
        raise ConsoleError("gripper: open, close or null")
    axes = Axes(np.clip(values, -1, 1).astype(np.float32), gripper)
    return Drive(axes, message.get("held") is True, _number(message, "sent"))


def _count(message: dict[str, Any], key: str) -> int:
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ConsoleError(f"{key}: a count")
    return value


def _number(message: dict[str, Any], key: str) -> float:
    value = message.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConsoleError(f"{key}: a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConsoleError(f"{key}: a finite number")
    return number


def text_of(message: dict[str, Any], key: str, longest: int) -> str:
    """A field's printable text; "" where it is missing.

    Raises:
        ConsoleError: something else, or longer.
    """
    value = message.get(key, "")
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise ConsoleError(f"{key}: text of at most {longest} printable characters")
    return value


def _name(message: dict[str, Any]) -> str:
    name = text_of(message, "name", MAX_NAME).strip()
    if not name:
        raise ConsoleError("name: say who you are")
    return name
