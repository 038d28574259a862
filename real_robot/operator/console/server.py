"""The console's server: one robot's page, whose buttons and hands are told to an operator.

Viewers get status and pictures. One browser at a time has control; an emergency stop is taken from any. The control
loop never waits for this thread: what it shows is read from a `ConsoleState`, and what a person does is told to an
operator.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from real_robot.control.supervisor import STOPPED, Supervisor
from real_robot.operator.console.config import ConsoleConfig
from real_robot.operator.console.messages import ConsoleMessage, Drive, Press, Reset, Stop, read_message
from real_robot.operator.console.operator import ConsoleOperator
from real_robot.operator.console.page_server import PageServer
from real_robot.operator.console.session import Session
from real_robot.operator.console.show import Show
from real_robot.operator.intervention import InterventionError


class ConsoleServer(PageServer):
    """The console's page and sockets; see the module.

    Raises:
        ConfigError: listening beyond loopback without a token, or a certificate that cannot be used.
    """

    refusals = (InterventionError,)

    def __init__(self, config: ConsoleConfig, operator: ConsoleOperator, supervisor: Supervisor) -> None:
        self._operator, self._supervisor = operator, supervisor
        self._console_state = operator.console_state
        self._console = Show(config, operator, supervisor)
        super().__init__(config, self._console)

    def stop_all(self, who: str) -> None:
        """Stop the robot."""
        self._operator.stop(who)

    def background(self) -> Coroutine[Any, Any, None]:
        """Pictures are encoded."""
        return self._console.encode()

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
                self._operator.press(button, session.name)
            case Reset(name):
                if self._supervisor.state.mode != STOPPED:
                    return "nothing to reset: the robot is not stopped"
                self._operator.reset(name)
        return ""
