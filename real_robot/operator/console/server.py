"""The console's server: one page over HTTP and one WebSocket for each browser, in a thread of its own.

Viewers get status and pictures. One browser at a time has control; an emergency stop is taken from any. The control
loop never waits for this thread: what it shows is read from a `ConsoleState`, and what a person does is told to an
operator.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from real_robot.bridge.images import encode_image
from real_robot.control.safety import STOPPED, Supervisor
from real_robot.operator.console.messages import (  # fmt: skip
    MAX_MESSAGE_BYTES,
    Alive,
    ConsoleError,
    ConsoleMessage,
    Drive,
    Press,
    ReleaseControl,
    Reset,
    Seen,
    Stop,
    TakeControl,
    read_message,
)
from real_robot.operator.console.operator import ConsoleOperator
from real_robot.operator.console.session import Session
from real_robot.operator.intervention import InterventionError
from real_robot.serving.protocol import is_loopback
from vla_rl.config import Config, ConfigError

log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # else each port scan leaves a traceback

SOCKET_PATH = "/socket"
_FOLDER = Path(__file__).parent
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/hands.js": ("hands.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
MAX_BAD_MESSAGES = 20
MAX_WRONG_TOKENS = 5
POLICY_VIOLATION = 1008
STATUSES_AHEAD, PICTURES_AHEAD = 3, 2  # sent and not yet taken in by the page


class ConsoleConfig(Config):
    """Where and how the console is served."""

    host: str = Field(default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port; 0 takes a free one.")
    token: str | None = Field(default=None, repr=False, description="What a person must give to take control.")
    origins: tuple[str, ...] = Field(
        default=(), description="Pages of other consoles that may show this robot too, such as http://bench2:8080."
    )
    status_rate: float = Field(default=10.0, gt=0, le=60, description="Status messages a second, to each browser.")
    camera_rate: float = Field(default=10.0, gt=0, le=60, description="Pictures a second of each camera, at most.")
    camera_side: int = Field(default=480, ge=32, le=4096, description="Larger pictures are made smaller: longest side.")
    jpeg_quality: int = Field(default=75, ge=10, le=100, description="JPEG quality of the pictures shown.")
    link_timeout: float = Field(
        default=1.0, gt=0, le=30, description="Seconds of silence of the console in control after which it holds."
    )
    max_clients: int = Field(default=16, ge=1, description="Browsers at a time.")


class ConsoleServer:
    """The console's page and sockets; see the module.

    Raises:
        ConfigError: listening beyond loopback without a token.
    """

    def __init__(self, config: ConsoleConfig, operator: ConsoleOperator, supervisor: Supervisor) -> None:
        if config.token is None and not is_loopback(config.host):
            raise ConfigError(
                f"console: {config.host} can be reached from other machines, so a token is required: give "
                "--console-token-file, or keep to 127.0.0.1 and reach it through an SSH tunnel"
            )
        self.config, self._operator, self._supervisor = config, operator, supervisor
        self._console_state = operator.console_state
        self._sessions: set[Session] = set()
        self._controller: Session | None = None
        self._pictures: dict[str, tuple[float, bytes]] = {}
        self._server: Server | None = None
        self._hosts = {urlsplit(origin).netloc.lower() for origin in config.origins}

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
            pictures = asyncio.ensure_future(self._encode())
            await stopping.wait()
            pictures.cancel()
            await self._stop()

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
            process_request=self._admit,
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
    def port(self) -> int:
        assert self._server is not None, "running"
        return next(iter(self._server.sockets)).getsockname()[1]

    # --- who may come in ----------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """The page's files; None lets a socket in."""
        path = request.path.partition("?")[0]
        host = (request.headers.get_all("Host") or [""])[0].lower()
        if is_loopback(self.config.host) and host not in self._hosts and not is_loopback(_hostname(f"//{host}")):
            return _respond(http.HTTPStatus.FORBIDDEN, f"this console is not called {host[:80]!r}\n")
        if path in _FILES:
            name, kind = _FILES[path]
            return _respond(http.HTTPStatus.OK, (_FOLDER / name).read_bytes(), kind)
        if path != SOCKET_PATH:
            return _respond(http.HTTPStatus.NOT_FOUND, "not found\n")
        origins = request.headers.get_all("Origin")
        if origins and not (len(origins) == 1 and self._may_embed(origins[0], host)):
            return _respond(http.HTTPStatus.FORBIDDEN, "pages of this origin may not connect; see origins\n")
        if len(self._sessions) >= self.config.max_clients:
            return _respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many consoles\n")
        return None

    def _may_embed(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may open the socket: our own page, or one that was named."""
        if origin in self.config.origins:
            return True
        if is_loopback(self.config.host):
            return is_loopback(_hostname(origin))
        return urlsplit(origin).netloc.lower() == host and bool(host)

    # --- one browser --------------------------------------------------------------------------

    async def _handle(self, connection: ServerConnection) -> None:
        session = Session(connection)
        self._sessions.add(session)
        tasks = [asyncio.ensure_future(part) for part in (self._show(session), self._show_pictures(session))]
        try:
            await self._listen(session)
        except ConnectionClosed:
            pass
        finally:
            self._sessions.discard(session)
            for task in tasks:
                task.cancel()
            self._release(session, "the console in control has left")

    async def _listen(self, session: Session) -> None:
        async for data in session.connection:
            now = time.monotonic()
            if session.is_flooding(now):
                await session.connection.close(POLICY_VIOLATION, "too many messages")
                return
            try:
                trouble = self._obey(session, read_message(data), now)
            except (ConsoleError, InterventionError) as error:
                trouble = str(error)
                session.num_bad += isinstance(error, ConsoleError)
            if trouble:
                session.refused.append(trouble)
            if session.num_bad > MAX_BAD_MESSAGES or session.num_wrong >= MAX_WRONG_TOKENS:
                await session.connection.close(POLICY_VIOLATION, "too many bad messages or wrong tokens")
                return

    def _obey(self, session: Session, message: ConsoleMessage, now: float) -> str:
        """Do what a browser asks. Returns why not, or ""."""
        match message:
            case Seen():
                session.seen = message
                return ""
            case Alive(sent=sent):
                session.heard = (sent, now)
            case Stop():
                self._operator.stop(session.name or "a viewer")
                return ""
            case TakeControl():
                return self._take_control(session, message)
        if session is not self._controller:
            return "" if isinstance(message, Alive) else "this console only watches: take control first"
        match message:
            case Alive(sent=sent) | Drive(sent=sent) if session.delay(sent, now) > self.config.link_timeout / 2:
                return ""  # It waited in a stalled connection: it says nothing of what the person does now.
            case Alive():
                self._operator.controller_seen()
            case Drive():
                self._operator.controller_seen()
                self._operator.drive(message)
            case Press(button):
                self._operator.controller_seen()
                self._operator.press(button, session.name)
            case Reset(name):
                if self._supervisor.state.mode != STOPPED:
                    return "nothing to reset: the robot is not stopped"
                self._operator.reset(name)
            case ReleaseControl():
                self._release(session, "control was given up")
        return ""

    def _take_control(self, session: Session, message: TakeControl) -> str:
        token = self.config.token
        if token is not None and not hmac.compare_digest(message.token.encode(), token.encode()):
            session.num_wrong += bool(message.token)
            return "wrong token" if message.token else "a token is needed to take control"
        holder = self._controller
        is_held = holder not in (None, session) and self._operator.controller_silence <= self.config.link_timeout
        if is_held and not (message.force and token is not None):
            assert holder is not None, "just checked"
            way = "take it from them with the token" if token is not None else "they must release it"
            return f"{holder.name} has control: {way}"
        if holder is not session:
            self._operator.let_go()
            self._console_state.notice(f"{message.name} has control")
        session.name, session.quickest = message.name, float("inf")
        self._controller = session
        self._operator.controller_seen()
        return ""

    def _release(self, session: Session, why: str) -> None:
        if self._controller is session:
            self._controller = None
            self._operator.controller_gone(why)

    # --- what is shown ------------------------------------------------------------------------

    async def _show(self, session: Session) -> None:
        """Status at a fixed rate; a slow browser gets fewer, never a queue."""
        send, wait = session.connection.send, 1 / self.config.status_rate
        with suppress(ConnectionClosed):
            await send(json.dumps(self._hello()))
            while True:
                if session.may_send("statuses", STATUSES_AHEAD):
                    await send(json.dumps(self._status(session)))
                    session.sent = replace(session.sent, statuses=session.sent.statuses + 1)
                await asyncio.sleep(wait)

    def _hello(self) -> dict[str, Any]:
        operator = self._operator
        return {
            "type": "hello",
            **self._console_state.facts(),
            "token_needed": self.config.token is not None,
            "moves": list(operator.teleoperation.moves),
            "drive_rate": min(30.0, max(10.0, self._console_state.contract.rate)),
            "drive_timeout": operator.teleoperation.config.timeout,
        }

    def _status(self, session: Session) -> dict[str, Any]:
        console_state, intervention, mode = self._console_state, self._operator.intervention, self._supervisor.state
        scores, notices = console_state.scores(session.scores_shown), console_state.notices(session.notices_shown)
        session.scores_shown = scores[-1][0] if scores else session.scores_shown
        session.notices_shown = notices[-1].number if notices else session.notices_shown
        summary = intervention.summary
        heard, session.heard = session.heard, None
        refused = [session.refused.popleft() for _ in range(len(session.refused))]
        return {
            "type": "status",
            "refused": refused,
            "echo": None if heard is None else [heard[0], round(time.monotonic() - heard[1], 4)],
            "mode": mode.mode,
            "reason": mode.reason,
            "is_still": self._supervisor.is_still,
            "loop_alive": console_state.tick_age < 1.0,
            "phase": intervention.state,
            "control_source": intervention.control_source,
            "outcome": summary.outcome,
            "interventions": summary.interventions,
            "recoveries": summary.recoveries,
            "alarms": summary.alarms,
            "can": self._operator.allowed(),
            "in_control": session is self._controller,
            "controller": self._controller.name if self._controller else None,
            "num_consoles": len(self._sessions),
            "scores": [[round(age, 3), value, limit] for _, age, value, limit in scores],
            "notices": [[n.time, n.text] for n in notices],
            **console_state.numbers(),
        }

    async def _show_pictures(self, session: Session) -> None:
        """Each camera's newest picture, once: a byte with the length of the camera's name, the name, a JPEG file."""
        with suppress(ConnectionClosed):
            while True:
                for name, (stamp, jpeg) in list(self._pictures.items()):
                    ahead = PICTURES_AHEAD * len(self._pictures)
                    if session.pictures_shown.get(name) != stamp and session.may_send("pictures", ahead):
                        session.pictures_shown[name] = stamp
                        encoded = name.encode()[:255]
                        await session.connection.send(bytes([len(encoded)]) + encoded + jpeg)
                        session.sent = replace(session.sent, pictures=session.sent.pictures + 1)
                await asyncio.sleep(0.5 / self.config.camera_rate)

    async def _encode(self) -> None:
        """Make JPEGs of the newest observation, while somebody looks."""
        shown = float("-inf")
        while True:
            await asyncio.sleep(1 / self.config.camera_rate)
            stamp, pictures = self._console_state.pictures()
            if not self._sessions or stamp == shown:
                continue
            shown = stamp
            jpegs = await asyncio.to_thread(self._make_jpegs, pictures)
            self._pictures = {name: (stamp, jpeg) for name, jpeg in jpegs.items()}

    def _make_jpegs(self, pictures: dict[str, np.ndarray]) -> dict[str, bytes]:
        return {
            name: encode_image(shrink(picture, self.config.camera_side), "jpeg", self.config.jpeg_quality)
            for name, picture in pictures.items()
        }


def shrink(picture: np.ndarray, side: int) -> np.ndarray:
    """The picture, uint8 (height, width, 3), made smaller so that no side is longer than that."""
    factor = side / max(picture.shape[:2])
    if factor >= 1:
        return picture
    import cv2

    height, width = (max(1, round(n * factor)) for n in picture.shape[:2])
    return cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)


def _hostname(url: str) -> str:
    """Of an origin or //host:port; "" where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _respond(status: http.HTTPStatus, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    data = body.encode() if isinstance(body, str) else body
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(data)), "Connection": "close", **_HEADERS})
    return Response(status.value, status.phrase, headers, data)
