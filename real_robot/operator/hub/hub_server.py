"""`vla-rl hub serve`: the page of several robots with their queue, and of the one robot that a person looks at.

The page speaks the console's messages, each with the `robot` that it means, and `help`, `hand_back` and `watch`. One
page at a time has control of the hub, under the console's rules; a stop is taken from any.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeFloat

from real_robot.operator.console.access import SOCKET_PATH, ConsoleConfig
from real_robot.operator.console.messages import (
    MAX_NAME,
    ConsoleMessage,
    Drive,
    Press,
    Reset,
    Stop,
    message_of,
    read_object,
    text_of,
)
from real_robot.operator.console.page_server import PageServer, Session
from real_robot.operator.hub.help_queue import HEAD_START, HelpError
from real_robot.operator.hub.hub import Hub
from real_robot.operator.hub.hub_log import HubLog
from real_robot.operator.hub.robot_link import RobotLink
from real_robot.serving.network import AddressError, client_context, read_token, server_url
from vla_rl.config import Config, ConfigError, merge, read_yaml, validate

LOOK_EVERY = 0.05  # seconds
MAX_ROBOTS = 64


@dataclass(frozen=True)
class ToRobot:
    """A console's message, and the robot that it is for; "" where it names none."""

    robot: str
    message: ConsoleMessage


@dataclass(frozen=True)
class Visit:
    """help: go to a robot ("": the first that waits); hand_back: leave it; watch: show it, and no more."""

    kind: Literal["help", "hand_back", "watch"]
    robot: str = ""


@dataclass(frozen=True)
class DriveRobot(Drive):
    """A drive message and the robot that it is for."""

    robot: str = ""


def read_hub_message(data: str | bytes) -> ConsoleMessage | ToRobot | Visit:
    """
    Raises:
        ConsoleError: none of these.
    """
    told = read_object(data)
    robot = text_of(told, "robot", MAX_NAME)
    kind = told.get("type")
    if kind in ("help", "hand_back", "watch"):
        return Visit(kind, robot)
    message = message_of(told)
    if isinstance(message, Drive):
        return DriveRobot(message.axes, message.held, message.sent, robot)
    return ToRobot(robot, message) if isinstance(message, Press | Reset | Stop) else message


class HubServer(PageServer):
    """Serves the hub; see the module.

    Attributes:
        failure: why the hub cannot go on, such as a log that cannot be written; its robots have been let go.
    """

    refusals = (HelpError,)
    token_place = "this hub's is the text in {file}, which `vla-rl hub serve` was given with --token-file"

    def __init__(self, config: ConsoleConfig, hub: Hub) -> None:
        self._hub = hub
        self._num_watched = 0
        self.failure: Exception | None = None
        super().__init__(config, "hub.js")

    async def background(self) -> None:
        """Keep the lines to the robots, the queue and the log."""
        for link in self._hub.links.values():
            link.on_change = self._look
        lines = [asyncio.ensure_future(link.run()) for link in self._hub.links.values()]
        try:
            while self.failure is None:
                self._look()
                await asyncio.sleep(LOOK_EVERY)
        finally:
            for line in lines:
                line.cancel()
            await asyncio.gather(*lines, return_exceptions=True)

    def _look(self) -> None:
        try:
            self._hub.look()
        except OSError as error:
            self.failure = error

    def watch(self, session: Session, robot: str) -> None:
        """From now on show this robot, from its beginning."""
        self._num_watched += 1
        session.watching = robot, self._num_watched
        session.greeted = session.view = None
        session.scores_shown = session.notices_shown = 0

    def statuses(self, session: Session) -> list[dict[str, Any]]:
        """The overview, and of the robot that is looked at what its console shows."""
        overview = self._hub.overview() | {
            "in_control": session is self.controller,
            "token_needed": self.config.token is not None,
            "num_pages": len(self.sessions),
            "refused": session.take_refused(),
            "echo": session.take_echo(),
        }
        watched = session.watching
        link = self._hub.links.get(watched[0])
        if link is None or link.hello is None or not link.is_fresh:
            session.greeted = None
            return [overview]
        messages = [overview]
        if session.greeted != watched:
            session.greeted = watched
            messages.append(link.hello | {"robot": link.name, "token_needed": overview["token_needed"]})
        return [*messages, self._status(session, link)]

    def pictures(self, session: Session) -> Mapping[bytes, bytes]:
        """The robot's, as its console sent them; after its hello, and never another robot's."""
        view = session.view
        link = self._hub.links.get(view[0]) if isinstance(view, tuple) else None
        return {} if link is None else link.pictures

    def _status(self, session: Session, link: RobotLink) -> dict[str, Any]:
        """The robot's own status, as this page may act on it."""
        now = time.monotonic()
        scores = [s for s in link.scores if s[0] > session.scores_shown]
        notices = [n for n in link.notices if n[0] > session.notices_shown]
        session.scores_shown = scores[-1][0] if scores else session.scores_shown
        session.notices_shown = notices[-1][0] if notices else session.notices_shown
        help = self._hub.queue.help
        visited = session is self.controller and help is not None and help.robot == link.name
        return link.status | {
            "refused": [],
            "echo": None,
            "in_control": visited and link.is_ours,
            "scores": [[round(now - at, 3), value, limit] for _, at, value, limit in scores],
            "notices": [[at, text] for _, at, text in notices],
        }

    def stop_all(self, who: str) -> None:
        """Stop every robot."""
        self._hub.stop(None, who)

    @property
    def silence(self) -> float:
        """Seconds since the person was heard."""
        return self._hub.silence

    def heard(self) -> None:
        """The person was heard just now; after a silence, in which the robots were let go, they stand by again."""
        if not self._hub.person and self.controller is not None:
            self._hub.enter(self.controller.name)
        self._hub.seen()

    def entered(self, name: str, is_new: bool) -> None:
        """The person has the hub, and every robot that nobody else has."""
        if is_new and self._hub.person:
            self._hub.leave(f"{name} took control")
        self._hub.enter(name)

    def left(self, why: str) -> None:
        """Every robot holds."""
        self._hub.leave(why)

    def read(self, data: str | bytes) -> ConsoleMessage | ToRobot | Visit:
        """One of the page's messages."""
        return read_hub_message(data)

    def watched(self, session: Session, message: Any) -> str | None:
        """Anybody may look at a robot, and stop one or all."""
        match message:
            case Visit("watch", robot):
                self.watch(session, robot)
                return ""
            case ToRobot(robot, Stop()):
                missed = self._hub.stop(robot or None, session.name or "a viewer")
                return f"not reached: {', '.join(missed)}; use their own emergency stops" if missed else ""
        return None

    def to_one_robot(self, message: Any) -> Any:
        """What is asked of a robot."""
        return message.message if isinstance(message, ToRobot) else message

    def obeyed(self, session: Session, message: Any) -> str:
        """What the person asks of the hub or of a robot.

        It is no sign of life: a visit or a hold may have waited in a stalled connection.
        """
        match message:
            case Visit("help", robot):
                self._hub.help(robot or None)
                help = self._hub.queue.help
                assert help is not None, "just begun"
                self.watch(session, help.robot)
            case Visit("hand_back"):
                self._hub.hand_back()
            case DriveRobot(robot=robot):
                self._hub.drive(robot, message)
            case ToRobot(robot, Press(button)):
                self._hub.press(robot, button)
            case ToRobot(robot, Reset(name)):
                self._hub.reset(robot, name)
            case _:
                return "robot: which one?"
        return ""


def console_url(text: str) -> str:
    """The address of a console's socket, from what a person writes: host:port, ws://..., or its page's address.

    Raises:
        AddressError: it is none, or the port is missing.
    """
    address = text.strip().replace("http://", "ws://", 1).replace("https://", "wss://", 1).rstrip("/")
    url = server_url(address)
    parts, told = urlsplit(url), urlsplit(address if "://" in address else f"ws://{address}")
    if told.port is None:
        raise AddressError(f"a robot's console {text[:80]!r}: the port is missing; allowed: host:port, ws://host:port")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{SOCKET_PATH}"


class RobotConfig(Config):
    """A robot of the hub: the console of its `vla-rl deploy`."""

    url: Annotated[str, AfterValidator(console_url)] = Field(description="Of its console, such as ws://bench1:8080.")
    token_file: Path | None = Field(default=None, description="File with the token that its console wants.")
    ca: Path | None = Field(default=None, description="With wss://: who signed its certificate; else the system's.")


class HubFile(Config):
    """The file that `vla-rl hub serve` reads."""

    robots: dict[str, RobotConfig] = Field(
        min_length=1, max_length=MAX_ROBOTS, description="Name -> how to reach it; the names are the person's."
    )
    head_start: NonNegativeFloat = Field(
        default=HEAD_START,
        description="Seconds that a robot whose score is twice its threshold counts as if it had waited longer.",
    )


def load_hub(file: Path | None, robots: Sequence[str] = ()) -> HubFile:
    """The file's robots, and those of `--robot NAME=ADDRESS`.

    Raises:
        ConfigError: neither names a robot, or one of them wrongly.
    """
    named: dict[str, dict[str, str]] = {}
    for text in robots:
        name, separator, url = text.partition("=")
        if not (separator and name.strip() and url.strip()):
            raise ConfigError(f"--robot: got {text[:80]!r}, expected NAME=ADDRESS, such as left=ws://bench1:8080")
        if name.strip() in named:
            raise ConfigError(f"--robot: {name.strip()!r} is given twice; each robot has a name of its own")
        named[name.strip()] = {"url": url.strip()}
    values = read_yaml(file) if file is not None else {}
    if not named and not values:
        raise ConfigError("hub: no robots; give a file (docs/hub.md), or --robot NAME=ws://HOST:PORT for each")
    return validate(HubFile, merge(values, {"robots": named}) if named else values, prefix="hub")


def make_links(robots: Mapping[str, RobotConfig]) -> dict[str, RobotLink]:
    """A line to each robot, not connected yet.

    Raises:
        ConfigError: a token or a certificate that cannot be read.
    """
    links = {}
    for name, robot in robots.items():
        token = read_token(robot.token_file) if robot.token_file else ""
        ssl = client_context(robot.ca) if robot.url.startswith("wss://") else None
        links[name] = RobotLink(name, robot.url, token, ssl)
    return links


def run_hub(config: HubFile, page: ConsoleConfig, log: Path | None, say: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: see `make_links` and `HubServer`. OSError: the port is taken, or the log cannot be written.
    """
    links = make_links(config.robots)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    with HubLog(log) as events:
        hub = Hub(links, events, config.head_start, page.link_timeout)
        server = HubServer(page, hub)
        with server.running():
            say(f"hub: {server.url}")
            while not over.wait(0.2) and server.failure is None:
                pass
        if server.failure is not None:
            raise OSError(f"the hub ended and its robots hold: {server.failure}")
        events("end")
    say("the hub has ended: its robots hold")
