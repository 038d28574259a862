"""What the console's page says and hears, without a page: a socket."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from websockets.sync.client import ClientConnection, connect


class Served(Protocol):
    """Something with a console on this machine."""

    @property
    def port(self) -> int: ...


def open_socket(served: Served, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{served.port}/socket", open_timeout=60, **options).__enter__()


class Browser:
    """What the page does, without a page."""

    def __init__(self, served: Served, **options: Any) -> None:
        self.socket = open_socket(served, **options)
        self.statuses = self.pictures = 0

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def hear(self) -> dict[str, Any]:
        """The next message that is no picture."""
        while isinstance(data := self.socket.recv(timeout=60), bytes):
            self.pictures += 1
        message = json.loads(data)
        self.statuses += message["type"] == "status"
        self.say("seen", statuses=self.statuses, pictures=self.pictures)
        return message

    def until(self, condition: Callable[[dict[str, Any]], Any], keep_alive: bool = True) -> dict[str, Any]:
        """The first status for which it is true."""
        end, status = time.monotonic() + 60, None
        while time.monotonic() < end:
            status = self.hear()
            if keep_alive:
                self.say("alive", sent=time.monotonic())
            if status["type"] == "status" and condition(status):
                return status
        raise AssertionError(f"not in 60 s; the last: {status}")

    def take_control(self, name: str = "anna", token: str = "", force: bool = False) -> dict[str, Any]:
        self.say("take_control", name=name, token=token, force=force)
        return self.until(lambda s: s["in_control"] or s["refused"])

    def press(self, button: str) -> None:
        self.say("press", button=button, sent=time.monotonic())

    def drive(self, **axes: float) -> None:
        self.say("drive", axes=axes, gripper=None, held=True, sent=time.monotonic())

    def take_over(self) -> None:
        """In control, and driving."""
        assert self.take_control()["in_control"]
        self.press("start")
        self.until(lambda s: s["mode"] == "running")
        self.press("take_over")
        self.until(lambda s: s["phase"] == "recovery")
