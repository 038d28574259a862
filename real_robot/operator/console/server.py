"""The console's server: one page over HTTP and one WebSocket for each browser, in a thread of its own.

Viewers get status and pictures. One browser at a time has control; an emergency stop is taken from any. The control
loop never waits for this thread: what it shows is read from a `ConsoleState`, and what a person does is told to an
operator.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from real_robot.control.safety import STOPPED, Supervisor
from real_robot.operator.console.config import ConsoleConfig
from real_robot.operator.console.door import Door
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
from real_robot.operator.console.show import Show
from real_robot.operator.intervention import InterventionError
from real_robot.serving.address import bracketed, is_loopback
from real_robot.serving.guests import HANDSHAKE_SECONDS, Guests
from real_robot.serving.tls import server_context
from vla_rl.config import ConfigError

_quiet = logging.getLogger(f"{__name__}.websockets")
_quiet.setLevel(logging.CRITICAL)  # else each port scan leaves a traceback

MAX_BAD_MESSAGES = 20
MAX_WRONG_TOKENS = 5
POLICY_VIOLATION = 1008


class ConsoleServer:
    """The console's page and sockets; see the module.

    Raises:
        ConfigError: listening beyond loopback without a token, or a certificate that cannot be used.
    """

    def __init__(self, config: ConsoleConfig, operator: ConsoleOperator, supervisor: Supervisor) -> None:
        if config.token is None and not is_loopback(config.host):
            raise ConfigError(
                f"console: {config.host} can be reached from other machines, so a token is required: give "
                "--console-token-file, or keep to 127.0.0.1 and reach it through an SSH tunnel"
            )
        self.config, self._operator, self._supervisor = config, operator, supervisor
        self._console_state = operator.console_state
        self._tls = server_context(config.certificate, config.key)
        self._guests = Guests(config.max_clients)
        self._door = Door(config, self._guests, operator.stop)
        self._show = Show(config, operator, supervisor)
        self._server: Server | None = None

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
            pictures = asyncio.ensure_future(self._show.encode())
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
            ssl=self._tls,
            process_request=self._door.admit,
            create_connection=self._guests.connection_class(),
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
        if not await self._guests.enter(connection):
            return
        session = Session(connection)
        self._show.sessions.add(session)
        tasks = [asyncio.ensure_future(part) for part in (self._show.statuses(session), self._show.pictures(session))]
        try:
            await self._listen(session)
        except ConnectionClosed:
            pass
        finally:
            self._guests.leave(connection)
            self._show.sessions.discard(session)
            for task in tasks:
                task.cancel()
            self._release(session, "the console in control has left")

    async def _listen(self, session: Session) -> None:
        async for data in session.connection:
            now = time.monotonic()
            self._guests.spoke(session.connection)
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
        if session is not self._show.controller:
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
        holder = self._show.controller
        is_held = holder not in (None, session) and self._operator.controller_silence <= self.config.link_timeout
        if is_held and not (message.force and token is not None):
            assert holder is not None, "just checked"
            way = "take it from them with the token" if token is not None else "they must release it"
            return f"{holder.name} has control: {way}"
        if holder is not session:
            self._operator.let_go()
            self._console_state.notice(f"{message.name} has control")
        session.name, session.quickest = message.name, float("inf")
        self._show.controller = session
        self._operator.controller_seen()
        return ""

    def _release(self, session: Session, why: str) -> None:
        if self._show.controller is session:
            self._show.controller = None
            self._operator.controller_gone(why)
