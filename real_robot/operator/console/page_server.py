"""A web page's server: its sockets, of which one at a time has control, in a thread of its own.

What a page shows and what its messages do is a subclass's: the console of one robot (`server.py`), the hub of several.
Viewers only watch; an emergency stop is taken from any. A slow browser gets fewer messages, never a queue.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from real_robot.operator.console.access import ConsoleAccess, ConsoleConfig
from real_robot.operator.console.messages import (
    MAX_MESSAGE_BYTES,
    Alive,
    ConsoleError,
    Drive,
    Press,
    ReleaseControl,
    Reset,
    Seen,
    TakeControl,
)
from real_robot.serving.connections import HANDSHAKE_SECONDS, ConnectionSlots
from real_robot.serving.network import bracketed, is_loopback, server_context
from vla_rl.config import ConfigError

MAX_MESSAGES_PER_SECOND = 200
UNSEEN_PAUSE = 2.0  # seconds after which a page that says nothing gets one more
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # else each port scan leaves a traceback

MAX_BAD_MESSAGES = 20
STATUSES_AHEAD, PICTURES_AHEAD = 3, 2  # sent and not yet taken in by the page
MAX_WRONG_TOKENS = 5
POLICY_VIOLATION = 1008
CLOSING_SECONDS = 5.0  # for what runs beside the sessions to let go of its own connections


class Session:
    """One browser: what it has been sent, has seen and has said."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.name = ""
        self.num_bad = self.num_wrong = 0
        self.scores_shown = self.notices_shown = 0
        self.watching: tuple[str, int] = ("", 0)  # at a hub: the robot that is looked at, and a count of such wishes
        self.greeted: object = None  # what is shown, once its hello has been made; None: nothing yet
        self.view: object = None  # the same, once its hello has been sent
        self.refused: deque[str] = deque(maxlen=8)  # told with the next status, so that listening never waits
        self.heard: tuple[float, float] | None = None  # (the page's clock, ours) of its last word, not echoed yet
        self.quickest = float("inf")  # smallest (arrival - page's clock) seen, seconds
        self._window, self._in_window = 0.0, 0
        self.sent, self.seen = Seen(0, 0), Seen(0, 0)
        self._forced = dict.fromkeys(("statuses", "pictures"), time.monotonic())

    def take_refused(self) -> list[str]:
        """What was refused since the last status."""
        return [self.refused.popleft() for _ in range(len(self.refused))]

    def take_echo(self) -> list[float] | None:
        """The page's clock when it was last heard, and the seconds since; None where that was told."""
        heard, self.heard = self.heard, None
        return None if heard is None else [heard[0], round(time.monotonic() - heard[1], 4)]

    def may_send(self, what: Literal["statuses", "pictures"], ahead: int) -> bool:
        """Return whether the page keeps up. One that never says so gets little."""
        if getattr(self.sent, what) - getattr(self.seen, what) < ahead:
            return True
        now = time.monotonic()
        is_due = now - self._forced[what] > UNSEEN_PAUSE
        self._forced[what] = now if is_due else self._forced[what]
        return is_due

    def is_flooding(self, now: float) -> bool:
        """Count a message; return whether there were too many within a second."""
        if now - self._window > 1.0:
            self._window, self._in_window = now, 0
        self._in_window += 1
        return self._in_window > MAX_MESSAGES_PER_SECOND

    def delay(self, sent: float, now: float) -> float:
        """Return the seconds that a message came later than the quickest one: what waited in a stalled connection."""
        self.quickest = min(self.quickest, now - sent)
        return now - sent - self.quickest


class PageServer(ABC):
    """See the module.

    Args:
        script: of the page.

    Attributes:
        sessions, controller: the browsers that are connected, and the one that has control.
        refusals: errors of what a browser asks, besides `ConsoleError`, whose text it is told.
        token_place: where a person finds the token; `{file}` is its file.

    Raises:
        ConfigError: listening beyond loopback without a token, or a certificate that cannot be used.
    """

    refusals: tuple[type[Exception], ...] = ()
    token_place = (
        "this console's is the text in {file}, which `vla-rl deploy` on the robot's computer was given with "
        "--console-token-file"
    )

    def __init__(self, config: ConsoleConfig, script: str = "console.js") -> None:
        if config.token is None and not is_loopback(config.host):
            raise ConfigError(
                f"console: {config.host} can be reached from other machines, so a token is required: give "
                "--console-token-file, or keep to 127.0.0.1 and reach it through an SSH tunnel"
            )
        self.config = config
        self.sessions: set[Session] = set()
        self.controller: Session | None = None
        self._tls = server_context(config.certificate, config.key)
        self._slots = ConnectionSlots(config.max_clients)
        self._door = ConsoleAccess(config, self._slots, self.stop_all, script)
        self._server: Server | None = None

    # --- a subclass's -------------------------------------------------------------------------

    @abstractmethod
    def stop_all(self, who: str) -> None:
        """Stop everything that this page controls."""

    @abstractmethod
    def background(self) -> Coroutine[Any, Any, None]:
        """What runs beside the sessions, until canceled."""

    @property
    @abstractmethod
    def silence(self) -> float:
        """Seconds since the session in control was heard; infinite where there is none."""

    @abstractmethod
    def heard(self) -> None:
        """The session in control has just been heard."""

    @abstractmethod
    def entered(self, name: str, is_new: bool) -> None:
        """A session has control now, under this name. `is_new`: another one, or none, had it before."""

    @abstractmethod
    def left(self, why: str) -> None:
        """No session has control now."""

    @abstractmethod
    def read(self, data: str | bytes) -> Any:
        """
        Raises:
            ConsoleError: not one of the messages that this page sends.
        """

    @abstractmethod
    def watched(self, session: Session, message: Any) -> str | None:
        """Do what any viewer may ask. Returns why not, "" where it is done; None where it takes control."""

    @abstractmethod
    def obeyed(self, session: Session, message: Any) -> str:
        """Do what the session in control asks, which is not too late. Returns why not, or ""."""

    @abstractmethod
    def statuses(self, session: Session) -> list[dict[str, Any]]:
        """The messages to send now."""

    @abstractmethod
    def pictures(self, session: Session) -> Mapping[Any, bytes]:
        """Camera -> the message with its newest picture."""

    def to_one_robot(self, message: Any) -> Any:
        """A console's message without the robot that it is for; for pages whose messages name one."""
        return message

    # --- life ---------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[int]:
        """Serve in a thread of its own; gives the port.

        Raises:
            OSError: the port is taken.
        """
        loop = asyncio.new_event_loop()
        stopping, started = asyncio.Event(), threading.Event()
        failure: list[Exception] = []

        async def main() -> None:
            try:
                await self._start()
            except OSError as error:
                failure.append(error)
                return
            finally:
                started.set()
            beside = asyncio.ensure_future(self.background())
            await stopping.wait()
            beside.cancel()
            await self._stop()
            await asyncio.wait([beside], timeout=CLOSING_SECONDS)

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="console", daemon=True)
        thread.start()
        started.wait()
        if failure:
            thread.join()
            loop.close()
            raise failure[0]
        try:
            yield self.port
        finally:
            loop.call_soon_threadsafe(stopping.set)
            thread.join(10)
            if not thread.is_alive():
                loop.close()

    async def _start(self) -> None:
        self._server = await serve(
            self._handle,
            self.config.host,
            self.config.port,
            ssl=self._tls,
            process_request=self._door.admit,
            create_connection=self._slots.connection_class(),
            open_timeout=HANDSHAKE_SECONDS,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            max_queue=4,
            ping_interval=2,
            ping_timeout=4,
            close_timeout=1,
            logger=_quiet,
        )

    async def _stop(self) -> None:
        assert self._server is not None, "started"
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"{'https' if self._tls else 'http'}://{bracketed(self.config.host)}:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None, "running"
        return next(iter(self._server.sockets)).getsockname()[1]

    # --- one browser --------------------------------------------------------------------------

    async def _handle(self, connection: ServerConnection) -> None:
        if not await self._slots.enter(connection):
            return
        session = Session(connection)
        self.sessions.add(session)
        tasks = [asyncio.ensure_future(part) for part in (self._send_statuses(session), self._send_pictures(session))]
        try:
            await self._listen(session)
        except ConnectionClosed:
            pass
        finally:
            self._slots.leave(connection)
            self.sessions.discard(session)
            for task in tasks:
                task.cancel()
            self._release(session, "the console in control has left")

    async def _send_statuses(self, session: Session) -> None:
        """Status at a fixed rate."""
        with suppress(ConnectionClosed):
            while True:
                if session.may_send("statuses", STATUSES_AHEAD):
                    for message in self.statuses(session):
                        await session.connection.send(json.dumps(message))
                    session.view = session.greeted
                    session.sent = replace(session.sent, statuses=session.sent.statuses + 1)
                await asyncio.sleep(1 / self.config.status_rate)

    async def _send_pictures(self, session: Session) -> None:
        """Each picture once, and none of a view that is no longer looked at."""
        shown: dict[Any, bytes] = {}
        view: object = ()
        with suppress(ConnectionClosed):
            while True:
                if view != (view := session.view):
                    shown.clear()
                pictures = dict(self.pictures(session))
                for camera, data in pictures.items():
                    if session.view != view:
                        break
                    if shown.get(camera) is not data and session.may_send("pictures", PICTURES_AHEAD * len(pictures)):
                        shown[camera] = data
                        await session.connection.send(data)
                        session.sent = replace(session.sent, pictures=session.sent.pictures + 1)
                await asyncio.sleep(0.5 / self.config.camera_rate)

    async def _listen(self, session: Session) -> None:
        async for data in session.connection:
            now = time.monotonic()
            self._slots.spoke(session.connection)
            if session.is_flooding(now):
                await session.connection.close(POLICY_VIOLATION, "too many messages")
                return
            try:
                trouble = self._obey(session, self.read(data), now)
            except (ConsoleError, *self.refusals) as error:
                trouble = str(error)
                session.num_bad += isinstance(error, ConsoleError)
            if trouble:
                session.refused.append(trouble)
            if session.num_bad > MAX_BAD_MESSAGES or session.num_wrong >= MAX_WRONG_TOKENS:
                await session.connection.close(POLICY_VIOLATION, "too many bad messages or wrong tokens")
                return

    def _obey(self, session: Session, message: Any, now: float) -> str:
        """Do what a browser asks. Returns why not, or ""."""
        match message:
            case Seen():
                session.seen = message
                return ""
            case Alive(sent=sent):
                session.heard = (sent, now)
            case TakeControl():
                return self._take_control(session, message)
        if (answer := self.watched(session, message)) is not None:
            return answer
        if session is not self.controller:
            return "" if isinstance(message, Alive) else "this console only watches: take control first"
        match message:
            case Alive(sent=sent) | Drive(sent=sent) if session.delay(sent, now) > self.config.link_timeout / 2:
                return ""  # It waited in a stalled connection: it says nothing of what the person does now.
            case ReleaseControl():
                self._release(session, "control was given up")
                return ""
            case Alive():
                self.heard()
                return ""
        return self._too_late(session, message, now) or self.obeyed(session, message)

    def _too_late(self, session: Session, message: Any, now: float) -> str:
        """Why a button is not obeyed that waited in a stalled connection, or "". A hold is never too late."""
        match self.to_one_robot(message):
            case Press(what, sent) if what != "hold":
                pass
            case Reset(_, sent):
                what = "reset"
            case _:
                return ""
        late = session.delay(sent, now)
        if late <= self.config.link_timeout:
            return ""
        return f"{what}: came {late:.1f} s late over a stalled connection, and is not done; look, and press again"

    def _take_control(self, session: Session, message: TakeControl) -> str:
        token = self.config.token
        if token is not None and not hmac.compare_digest(message.token.encode(), token.encode()):
            session.num_wrong += bool(message.token)
            told = "wrong token" if message.token else "a token is needed to take control"
            return f"{told}: {self.token_place.format(file=self.config.token_file or 'the file')}"
        holder = self.controller
        is_held = holder not in (None, session) and self.silence <= self.config.link_timeout
        if is_held and not (message.force and token is not None):
            assert holder is not None, "just checked"
            way = "take it from them with the token" if token is not None else "they must release it"
            return f"{holder.name} has control: {way}"
        session.name, session.quickest = message.name, float("inf")
        self.controller = session
        self.entered(message.name, holder is not session)
        return ""

    def _release(self, session: Session, why: str) -> None:
        if self.controller is session:
            self.controller = None
            self.left(why)
