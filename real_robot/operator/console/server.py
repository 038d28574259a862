"""The console's server: one robot's page, its status and pictures, its buttons and teleoperation.

Viewers get status and pictures. One browser at a time has control; an emergency stop is taken from any. The control
loop never waits for this thread: what it shows is read from a `ConsoleState`, and what a person does is told to an
operator.
"""

from __future__ import annotations

import asyncio
from typing import Any

import cv2
import numpy as np

from real_robot.bridge.codec import encode_image
from real_robot.control.supervisor import STOPPED, Supervisor
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.console.messages import ConsoleMessage, Drive, Press, Reset, Stop, read_message
from real_robot.operator.console.operator import ConsoleOperator
from real_robot.operator.console.page_server import PageServer, Session
from real_robot.operator.intervention import EpisodeSummary, InterventionError

LONGEST_SIDE, JPEG_QUALITY = 480, 75  # of the pictures shown


class ConsoleServer(PageServer):
    """The console's page and sockets; see the module.

    Raises:
        ConfigError: listening beyond loopback without a token, or a certificate that cannot be used.
    """

    refusals = (InterventionError,)

    def __init__(self, config: ConsoleConfig, operator: ConsoleOperator, supervisor: Supervisor) -> None:
        self._operator, self._supervisor = operator, supervisor
        self._console_state = operator.console_state
        self._pictures: dict[str, bytes] = {}
        super().__init__(config)

    def statuses(self, session: Session) -> list[dict[str, Any]]:
        greeting = [] if session.greeted else [self._hello()]
        session.greeted = True
        return [*greeting, self._status(session)]

    def pictures(self, session: Session) -> dict[str, bytes]:
        """Each: a byte with the length of the camera's name, the name, a JPEG file."""
        return self._pictures

    def _hello(self) -> dict[str, Any]:
        operator = self._operator
        return {
            "type": "hello",
            **self._console_state.facts(),
            "token_needed": self.config.token is not None,
            "moves": list(operator.teleoperation.moves),
            "has_scene": operator.scene is not None,
            "drive_rate": min(30.0, max(10.0, self._console_state.contract.rate)),
            "drive_timeout": operator.teleoperation.config.timeout,
        }

    def _status(self, session: Session) -> dict[str, Any]:
        console_state, intervention, mode = self._console_state, self._operator.intervention, self._supervisor.state
        scores, notices = console_state.scores(session.scores_shown), console_state.notices(session.notices_shown)
        session.scores_shown = scores[-1][0] if scores else session.scores_shown
        session.notices_shown = notices[-1].number if notices else session.notices_shown
        summary = intervention.summary
        return {
            "type": "status",
            "refused": session.take_refused(),
            "echo": session.take_echo(),
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
            "why": _why(summary),
            "can": self._operator.allowed(),
            "in_control": session is self.controller,
            "controller": self.controller.name if self.controller else None,
            "num_consoles": len(self.sessions),
            "scores": [[round(age, 3), value, limit] for _, age, value, limit in scores],
            "notices": [[n.time, n.text] for n in notices],
            **console_state.numbers(),
        }

    async def background(self) -> None:
        """Make JPEGs of the newest observation, while somebody looks."""
        shown = float("-inf")
        while True:
            await asyncio.sleep(1 / self.config.camera_rate)
            stamp, pictures = self._console_state.pictures()
            if not self.sessions or stamp == shown:
                continue
            shown = stamp
            self._pictures = await asyncio.to_thread(_messages, pictures)

    def stop_all(self, who: str) -> None:
        """Stop the robot."""
        self._operator.stop(who)

    @property
    def silence(self) -> float:
        """Seconds since the console in control was heard."""
        return self._operator.controller_silence

    def heard(self) -> None:
        """It was heard just now."""
        self._operator.controller_seen()

    def entered(self, name: str, is_new: bool) -> None:
        """What was held before is let go."""
        if is_new:
            self._operator.let_go()
            self._console_state.notice(f"{name} has control")
        self._operator.controller_seen()

    def left(self, why: str) -> None:
        """The robot holds."""
        self._operator.controller_gone(why)

    def read(self, data: str | bytes) -> ConsoleMessage:
        """One of the console's messages."""
        return read_message(data)

    def watched(self, session: Session, message: ConsoleMessage) -> str | None:
        """A stop is taken from anybody."""
        if not isinstance(message, Stop):
            return None
        self._operator.stop(session.name or "a viewer")
        return ""

    def obeyed(self, session: Session, message: ConsoleMessage) -> str:
        """Hands and buttons go to the operator."""
        match message:
            case Drive():
                self._operator.controller_seen()
                self._operator.drive(message)
            case Press(button):
                self._operator.controller_seen()
                stopped = self._supervisor.state
                if button == "resume" and stopped.mode == STOPPED:
                    return f"resume: the robot is stopped ({stopped.reason}); reset it first"
                self._operator.press(button, session.name)
            case Reset(name):
                if self._supervisor.state.mode != STOPPED:
                    return "nothing to reset: the robot is not stopped"
                self._operator.reset(name)
        return ""


def _why(summary: EpisodeSummary) -> str:
    """What brought the episode where it stands: event, who, and the reason where one was said."""
    if not summary.transitions:
        return ""
    last = summary.transitions[-1]
    return f"{last.event.replace('_', ' ')} ({last.who}){': ' + last.reason if last.reason else ''}"[:300]


def shrink(picture: np.ndarray, side: int) -> np.ndarray:
    """The picture, uint8 (height, width, 3), made smaller so that no side is longer than that."""
    factor = side / max(picture.shape[:2])
    if factor >= 1:
        return picture
    height, width = (max(1, round(n * factor)) for n in picture.shape[:2])
    return cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)


def _messages(pictures: dict[str, np.ndarray]) -> dict[str, bytes]:
    names = {camera: camera.encode()[:255] for camera in pictures}
    jpegs = {c: encode_image(shrink(p, LONGEST_SIDE), "jpeg", JPEG_QUALITY) for c, p in pictures.items()}
    return {camera: bytes([len(name)]) + name + jpegs[camera] for camera, name in names.items()}
