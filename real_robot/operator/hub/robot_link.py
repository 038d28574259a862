"""The hub's line to one robot: a client of the console that `vla-rl deploy` serves, like a page in a browser.

It says "alive" only while a person is at the hub, so that a robot holds when the person, the hub or the line is gone:
that is the console's own rule (`docs/console.md`), and the robot's process applies it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

ALIVE_EVERY = 0.2  # seconds
STALE_AFTER = 1.5  # seconds without a status after which nothing is known of the robot
RETRY_AFTER = 1.0
MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # a picture
MAX_OUTBOX = 64
MAX_PICTURES = 16
MAX_SCORES, MAX_NOTICES = 1024, 32


class RobotLink:
    """See the module. Lives in one event loop; nothing here waits but `run`.

    Args:
        url: of the console's socket, ws://host:port/socket. token: what it wants for control.
        on_change: called after each status, and when the line is lost.

    Attributes:
        hello, status: the console's newest messages. score: the newest, and its threshold.
        scores: (number, monotonic seconds, score, threshold). notices: (number, seconds since the epoch, text).
        pictures: camera -> its newest message.
    """

    def __init__(
        self,
        name: str,
        url: str,
        token: str = "",
        ssl: SSLContext | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.url, self._token, self._ssl = name, url, token, ssl
        self.on_change = on_change
        self.hello: dict[str, Any] | None = None
        self.status: dict[str, Any] = {}
        self.score: tuple[float, float] | None = None
        self.scores: deque[tuple[int, float, float, float]] = deque(maxlen=MAX_SCORES)
        self.notices: deque[tuple[int, float, str]] = deque(maxlen=MAX_NOTICES)
        self._num_shown = 0
        self.trouble = "not connected yet"
        self.person = ""  # who is at the hub; "": nobody
        self._heard = self._asked = float("-inf")
        self._outbox: deque[dict[str, Any]] = deque(maxlen=MAX_OUTBOX)
        self._news = asyncio.Event()
        self._connection: ClientConnection | None = None
        self._refused = False  # the token is wrong: asking again would only get us disconnected
        self.pictures: dict[bytes, bytes] = {}

    @property
    def is_fresh(self) -> bool:
        """The robot's process has been heard just now."""
        return self._connection is not None and time.monotonic() - self._heard <= STALE_AFTER

    @property
    def is_ours(self) -> bool:
        """The hub has control of this robot."""
        return self.is_fresh and bool(self.status.get("in_control"))

    # --- asked by the hub -------------------------------------------------------------------------

    def say(self, kind: str, **fields: Any) -> bool:
        """Send a message of the console's protocol; False where there is no connection.

        Of drive messages only the newest is kept, and a stop comes before all that waits.
        """
        if self._connection is None:
            return False
        message = {"type": kind, **fields}
        if kind == "drive":
            for old in [m for m in self._outbox if m["type"] == "drive"]:
                self._outbox.remove(old)
        if kind == "stop":
            self._outbox.appendleft(message)
        else:
            self._outbox.append(message)
        self._news.set()
        return True

    def set_person(self, name: str) -> None:
        """A person is at the hub, under this name; "": nobody is, and the robot is let go, so that it holds."""
        before, self.person = self.person, name
        if not name and before:
            self.say("release_control")
        elif name != before:
            self._asked = float("-inf")
            self._refused = False
            if before:
                self.say("take_control", name=name, token=self._token, force=False)

    # --- the connection ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, and again whenever the line is lost, until canceled."""
        while True:
            try:
                async with connect(
                    self.url, ssl=self._ssl, compression=None, max_size=MAX_MESSAGE_BYTES, proxy=None, open_timeout=10
                ) as connection:
                    await self._serve(connection)
                self.trouble = "the robot closed the connection"
            except (OSError, WebSocketException, TimeoutError, ValueError) as error:
                self.trouble = f"{type(error).__name__}: {error}"[:200]
            finally:
                self._forget()
            self.on_change()
            await asyncio.sleep(RETRY_AFTER)

    def _forget(self) -> None:
        self._connection, self.status, self.score = None, {}, None
        self._outbox.clear()
        self.pictures.clear()

    async def _serve(self, connection: ClientConnection) -> None:
        self._outbox.clear()
        self._connection, self._refused, self.trouble = connection, False, ""
        self._asked = float("-inf")
        sender = asyncio.ensure_future(self._send(connection))
        statuses = pictures = 0
        try:
            async for data in connection:
                if isinstance(data, bytes):
                    pictures += 1
                    self._keep(data)
                    continue
                message = json.loads(data)
                if message.get("type") == "hello":
                    self.hello = message
                elif message.get("type") == "status":
                    statuses += 1
                    self.say("seen", statuses=statuses, pictures=pictures)
                    self._take(message)
        finally:
            sender.cancel()
            with suppress(asyncio.CancelledError, WebSocketException, OSError):
                await sender

    def _keep(self, data: bytes) -> None:
        camera = data[1 : 1 + data[0]] if data else b""
        if camera in self.pictures or len(self.pictures) < MAX_PICTURES:
            self.pictures[camera] = data

    def _take(self, status: dict[str, Any]) -> None:
        self._heard, self.status = time.monotonic(), status
        for age, value, limit in status.pop("scores", ()):
            self._num_shown += 1
            self.score = (float(value), float(limit))
            self.scores.append((self._num_shown, self._heard - float(age), *self.score))
        for at, text in status.pop("notices", ()):
            self._num_shown += 1
            self.notices.append((self._num_shown, float(at), str(text)[:300]))
        if status.get("phase") in ("idle", "ended"):
            self.score = None
        refused = [str(text) for text in status.get("refused", ())]
        for text in refused:
            if "token" in text:
                self._refused = True
        if refused:
            self.trouble = refused[-1][:200]
        elif status.get("in_control"):
            self.trouble = ""
        self.on_change()

    async def _send(self, connection: ClientConnection) -> None:
        alive = 0.0
        while True:
            now = time.monotonic()
            self._want_control(now)
            if self.person and now - alive >= ALIVE_EVERY:
                alive = now
                self._outbox.append({"type": "alive", "sent": now})
            while self._outbox:
                await connection.send(json.dumps(self._outbox.popleft()))
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), ALIVE_EVERY / 2)

    def _want_control(self, now: float) -> None:
        """Ask for control where a person is here and nobody else has it; again after a while, as a page does."""
        if not self.person or self._refused or not self.status or self.status.get("in_control"):
            return
        if self.status.get("controller") is None and now - self._asked >= RETRY_AFTER:
            self._asked = now
            self.say("take_control", name=self.person, token=self._token, force=False)
