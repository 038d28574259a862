"""The hub of several robots: who asks for help, whom the person is with, and which of the person's words reach a robot.

A robot needs help when its episode is under way and nothing drives it: it is paused (an alarm, somebody's hold, a lost
line), a person has left it in the middle of a correction, or it is stopped. It holds all that time. The person is with
one robot at a time; only that one is driven. Starting and holding need no visit, and a stop needs nobody in control.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from real_robot.operator.console.messages import Drive
from real_robot.operator.hub.help_queue import HelpError, HelpQueue, Request
from real_robot.operator.hub.robot_link import RobotLink
from real_robot.operator.teleop import AXES

RobotState = Literal["lost", "stopped", "asks", "helped", "running", "ready"]
DRIVEN = ("recovery", "correction", "demo")
ANY_ROBOT = ("start", "hold")  # buttons that need no visit


def needs_help(status: Mapping[str, Any]) -> str:
    """Why a robot needs a person, by its console's status; "" where it does not."""
    if status.get("mode") == "stopped":
        return f"stopped: {status.get('reason') or 'no reason given'}"
    phase = status.get("phase")
    if phase == "paused":
        return str(status.get("why") or "it holds")
    return f"left in the {phase}" if phase in DRIVEN else ""


class Hub:
    """See the module. Lives in one event loop; nothing here waits.

    Args:
        log: called with `(event, **fields)` at each event; raises where it cannot be written, which ends the hub.
        link_timeout: seconds of silence of the person's page after which the person counts as gone.
    """

    def __init__(
        self,
        links: Mapping[str, RobotLink],
        log: Callable[..., None],
        head_start: float,
        link_timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links, self._log, self._clock = dict(links), log, clock
        self._link_timeout = link_timeout
        self.queue = HelpQueue(head_start, clock, log)
        self.person = ""  # in control of the hub; "": nobody
        self._seen = float("-inf")
        self._states: dict[str, RobotState] = dict.fromkeys(self.links, "lost")
        log("begin", robots=list(self.links))

    # --- robots -----------------------------------------------------------------------------------

    def state(self, name: str) -> RobotState:
        """How it stands with a robot."""
        link = self.links[name]
        if not link.is_fresh:
            return "lost"
        if link.status.get("mode") == "stopped":
            return "stopped"
        if self.queue.help is not None and self.queue.help.robot == name:
            return "helped"
        if needs_help(link.status):
            return "asks"
        return "running" if link.status.get("phase") in ("autonomous", "rewinding") else "ready"

    def look(self) -> None:
        """Bring queue and log up to date. Call it after each status, and many times a second."""
        if self.person and self._clock() - self._seen > self._link_timeout:
            self.leave("the person's page is silent")
        for name, link in self.links.items():
            why = needs_help(link.status) if link.is_fresh else ""
            helped = self.queue.help is not None and self.queue.help.robot == name
            if not link.is_fresh and helped:
                self.queue.hand_back("no connection to the robot")
            elif why and not helped:
                score, threshold = link.score or (None, None)
                self.queue.ask(name, why, score, threshold)
            elif not why:
                self.queue.withdraw(name, "needs no help any more" if link.is_fresh else "no connection to the robot")
            if (state := self.state(name)) != self._states[name]:
                self._log("state", robot=name, before=self._states[name], after=state)
                self._states[name] = state

    # --- the person -------------------------------------------------------------------------------

    @property
    def silence(self) -> float:
        """Seconds since the person was heard."""
        return self._clock() - self._seen

    def seen(self) -> None:
        """The person's page has just been heard."""
        self._seen = self._clock()

    def enter(self, name: str) -> None:
        """A person takes control of the hub, and with it of every robot that nobody else has."""
        if self.person and self.person != name:
            self.leave(f"{name} took control")
        self.seen()
        if self.person != name:
            self._log("control", who=name)
        self.person = name
        for link in self.links.values():
            link.set_person(name)

    def leave(self, why: str) -> None:
        """Nobody is at the hub now: every robot is let go and holds; the one that was helped waits again."""
        if not self.person:
            return
        self._hand_back(why)
        self._log("no_control", who=self.person, why=why)
        self.person = ""
        for link in self.links.values():
            link.set_person("")

    def help(self, robot: str | None) -> None:
        """The person goes to a robot, or to the first in the queue.

        Raises:
            HelpError: nobody is at the hub; with a robot already; nobody waits; no such robot; or it cannot be reached.
        """
        if not self.person:
            raise HelpError("help: nobody is at the hub; take control first")
        if robot is None:
            if not (waiting := self.queue.waiting()):
                raise HelpError("nobody waits for help")
            robot = waiting[0].robot
        link = self._link(robot)
        if not link.is_fresh:
            raise HelpError(f"{robot}: no connection ({link.trouble})")
        self.queue.help_robot(robot, self.person)

    def hand_back(self) -> None:
        """The person leaves the robot. One that still needs help waits again."""
        if self.queue.help is None:
            raise HelpError("no robot is being helped")
        self._hand_back("handed back")

    def _hand_back(self, why: str) -> None:
        if (help := self.queue.help) is not None:
            link = self.links[help.robot]
            if link.status.get("phase") in DRIVEN:
                link.say("drive", axes={}, gripper=None, held=False, sent=self._clock())
            self.queue.hand_back(why, asks_again=link.is_fresh and bool(needs_help(link.status)))

    def press(self, robot: str, button: str) -> None:
        """A button of a robot's console.

        Raises:
            HelpError: the person is not with this robot, and the button needs that; or it cannot be reached.
        """
        link = self._link(robot)
        if button not in ANY_ROBOT:
            self._check_with(robot, button)
        self._say(link, "press", button=button, sent=self._clock())
        self._log("press", robot=robot, who=self.person, button=button)

    def drive(self, robot: str, drive: Drive) -> None:
        """What the person's hands do, just now.

        Raises:
            HelpError: the person is not with this robot.
        """
        self._check_with(robot, "drive")
        axes = {axis: float(value) for axis, value in zip(AXES, drive.axes.values, strict=True)}
        link = self.links[robot]
        link.say("drive", axes=axes, gripper=drive.axes.gripper, held=drive.held, sent=self._clock())

    def reset(self, robot: str, name: str) -> None:
        """Motion is allowed again after a stop.

        Raises:
            HelpError: the person is not with this robot.
        """
        link = self._link(robot)
        self._check_with(robot, "reset")
        self._say(link, "reset", name=name, sent=self._clock())
        self._log("reset", robot=robot, who=name)

    def stop(self, robot: str | None, who: str) -> list[str]:
        """Emergency stop of one robot, or of all. Returns those that may not hear it: no line, or a silent one."""
        names = list(self.links) if robot is None else [self._link(robot).name]
        self._log("stop_all" if robot is None else "stop", who=who, robot=robot)
        told = {name for name in names if self.links[name].say("stop")}
        return [name for name in names if name not in told or not self.links[name].is_fresh]

    def _link(self, robot: str) -> RobotLink:
        if robot not in self.links:
            raise HelpError(f"robot: got {robot[:64]!r}, allowed: {', '.join(self.links)}")
        return self.links[robot]

    def _check_with(self, robot: str, what: str) -> None:
        if self.queue.help is None or self.queue.help.robot != robot:
            raise HelpError(f"{what}: go to {robot} first; from afar only {', '.join(ANY_ROBOT)} and stop are possible")

    def _say(self, link: RobotLink, kind: str, **fields: Any) -> None:
        if not link.is_ours:
            controller = link.status.get("controller")
            why = f"{controller} has control of it" if controller else link.trouble or "no control of it yet"
            raise HelpError(f"{link.name}: {why}")
        link.say(kind, **fields)

    # --- what is shown ----------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """Everything that the page's list shows, as plain JSON."""
        waiting = self.queue.waiting()
        help = self.queue.help
        return {
            "type": "hub",
            "person": self.person or None,
            "helping": None if help is None else help.robot,
            "helped_for": None if help is None else round(self._clock() - help.since, 1),
            "queue": [request.robot for request in waiting],
            "robots": [self._row(link, waiting) for link in self.links.values()],
        }

    def _row(self, link: RobotLink, waiting: list[Request]) -> dict[str, Any]:
        request = next((r for r in waiting if r.robot == link.name), None)
        status = link.status
        return {
            "name": link.name,
            "state": self.state(link.name),
            "phase": status.get("phase"),
            "mode": status.get("mode"),
            "task": status.get("instruction", ""),
            "outcome": status.get("outcome"),
            "event": status.get("why", ""),
            "score": link.score,
            "ours": link.is_ours,
            "controller": status.get("controller"),
            "trouble": link.trouble,
            "why": "" if request is None else request.reason,
            "waited": None if request is None else round(self.queue.seconds_waited(request), 1),
        }
