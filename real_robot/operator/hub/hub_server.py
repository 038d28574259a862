"""The hub's page and sockets: the list of robots with the queue, and the one robot that a person looks at.

The page speaks the console's messages, each with the `robot` that it means, and `help`, `hand_back` and `watch`. One
page at a time has control of the hub, under the console's rules; a stop is taken from any.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from websockets.exceptions import ConnectionClosed

from real_robot.operator.console.config import ConsoleConfig
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
from real_robot.operator.console.page_server import PageServer
from real_robot.operator.console.session import Session
from real_robot.operator.console.show import PICTURES_AHEAD, STATUSES_AHEAD
from real_robot.operator.hub.help_queue import HelpError
from real_robot.operator.hub.hub import Hub
from real_robot.operator.hub.robot_link import RobotLink

LOOK_EVERY = 0.05  # seconds


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


class HubShow:
    """What each session is sent: the overview, and of one robot what its console shows."""

    def __init__(self, config: ConsoleConfig, hub: Hub) -> None:
        self._config, self._hub = config, hub
        self.sessions: set[Session] = set()
        self.controller: Session | None = None
        self.watching: dict[Session, str] = {}
        self._greeted: dict[Session, str] = {}
        self._num_watched = 0
        self._shown: dict[Session, tuple[str, int]] = {}  # the robot whose hello was sent, and which `watch` that was

    def watch(self, session: Session, robot: str) -> None:
        """From now on show this robot, from its beginning."""
        self.watching[session] = robot
        self._num_watched += 1
        self._greeted.pop(session, None)
        self._shown.pop(session, None)
        session.scores_shown = session.notices_shown = 0

    async def statuses(self, session: Session) -> None:
        """The overview and the robot's status at a fixed rate; a slow browser gets fewer, never a queue."""
        try:
            with suppress(ConnectionClosed):
                while True:
                    if session.may_send("statuses", STATUSES_AHEAD):
                        robot, watched = self.watching.get(session, ""), self._num_watched
                        for message in self._messages(session):
                            await session.connection.send(json.dumps(message))
                        session.sent = replace(session.sent, statuses=session.sent.statuses + 1)
                        if robot and self._greeted.get(session) == robot and session not in self._shown:
                            self._shown[session] = robot, watched
                    await asyncio.sleep(1 / self._config.status_rate)
        finally:
            self.watching.pop(session, None)
            self._greeted.pop(session, None)
            self._shown.pop(session, None)

    def _messages(self, session: Session) -> list[dict[str, Any]]:
        heard, session.heard = session.heard, None
        overview = self._hub.overview() | {
            "in_control": session is self.controller,
            "token_needed": self._config.token is not None,
            "num_pages": len(self.sessions),
            "refused": [session.refused.popleft() for _ in range(len(session.refused))],
            "echo": None if heard is None else [heard[0], round(time.monotonic() - heard[1], 4)],
        }
        link = self._hub.links.get(self.watching.get(session, ""))
        if link is None or link.hello is None or not link.is_fresh:
            self._greeted.pop(session, None)
            return [overview]
        messages = [overview]
        if self._greeted.get(session) != link.name:
            self._greeted[session] = link.name
            messages.append(link.hello | {"robot": link.name, "token_needed": overview["token_needed"]})
        return [*messages, self._status(session, link)]

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

    async def pictures(self, session: Session) -> None:
        """Each of the robot's pictures, as its console sent it, once; after its hello, and never another robot's."""
        shown: dict[bytes, bytes] = {}
        view: tuple[str, int] | None = None
        with suppress(ConnectionClosed):
            while True:
                if view != (view := self._shown.get(session)):
                    shown.clear()
                link = None if view is None else self._hub.links.get(view[0])
                for camera, data in list(link.pictures.items()) if link is not None else ():
                    if self._shown.get(session) != view:
                        break  # The page looks at another one by now.
                    ahead = PICTURES_AHEAD * len(link.pictures) if link is not None else 0
                    if shown.get(camera) is not data and session.may_send("pictures", max(1, ahead)):
                        shown[camera] = data
                        await session.connection.send(data)
                        session.sent = replace(session.sent, pictures=session.sent.pictures + 1)
                await asyncio.sleep(0.5 / self._config.camera_rate)


class HubServer(PageServer):
    """Serves the hub; see the module.

    Attributes:
        failure: why the hub cannot go on, such as a log that cannot be written; its robots have been let go.
    """

    refusals = (HelpError,)
    token_place = "this hub's is the text in {file}, which `vla-rl hub serve` was given with --token-file"

    def __init__(self, config: ConsoleConfig, hub: Hub) -> None:
        self._hub, self._pages = hub, HubShow(config, hub)
        self.failure: Exception | None = None
        super().__init__(config, self._pages, "hub.js")

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

    def stop_all(self, who: str) -> None:
        """Stop every robot."""
        self._hub.stop(None, who)

    @property
    def silence(self) -> float:
        """Seconds since the person was heard."""
        return self._hub.silence

    def heard(self) -> None:
        """The person was heard just now; after a silence, in which the robots were let go, they stand by again."""
        if not self._hub.person and self._pages.controller is not None:
            self._hub.enter(self._pages.controller.name)
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
                self._pages.watch(session, robot)
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
                self._pages.watch(session, help.robot)
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
