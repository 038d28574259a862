"""Shutdown of `vla-rl deploy`: the robot brakes first, then the recording is finished, then the program exits.

    with Shutdown(say) as shutdown, ExitStack() as stack:
        recordings = stack.enter_context(ExitStack())
        loop = ControlLoop(..., Operators([shutdown, ...]))
        shutdown.run(loop)
        shutdown.finish(recordings)
    shutdown.exit(is_complete)

A signal while the loop runs is only noted, and ends the loop at the next tick: none can interrupt the braking. An error
of the loop (an observer, an operator, the robot) is kept until the recording is finished. Ctrl-Z does nothing: a
suspended process brakes nothing. From the loop's beginning on, nothing waits for the terminal.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

from real_robot.control.robot_loop import ControlLoop, OperatorCommand
from real_robot.types import RobotObservation

CAPACITY = 1000  # lines that wait; of more, the oldest are not told
_log = logging.getLogger(__name__)
_NAMES = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP")
SIGNALS = [number for name in _NAMES if (number := getattr(signal, name, None)) is not None]
SUSPEND = getattr(signal, "SIGTSTP", None)
HANG_UP = int(getattr(signal, "SIGHUP", signal.SIGTERM))
TELL_SECONDS = 2.0  # for the last lines, in a terminal that may stand
AGAIN = 1.0  # seconds: the same wish may come twice at once, from a terminal and its shell
STARTING, RUNNING, FINISHING, CLOSING = "starting", "running", "finishing", "closing"


class Lines:
    """Tells lines one after the other. A terminal that stands (Ctrl-S, a pipe that nobody reads) keeps them waiting.

    Args:
        tell: tells the person a line; may block.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()  # of a lock that a signal's handler may take again
        self._waiting: deque[str] = deque(maxlen=CAPACITY)
        self._is_busy = self._is_closed = False
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def put(self, text: str) -> None:
        """Tell a line soon. Does not wait."""
        with self._changed:
            self._waiting.append(text)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all is told; False where it is not in so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, seconds)

    def close(self) -> None:
        """End the thread once all is told. Does not wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if not self._waiting:
                    return
                text, self._is_busy = self._waiting.popleft(), True
            try:
                self._tell(text)
            except Exception as error:  # a line is lost; the next one may be told
                _log.warning("not told: %s (%s)", text, error)


class CutShortError(BaseException):
    """The recording is not to be waited for. Not an `Exception`, so that nobody on the way takes it for his own."""


class Shutdown:
    """See the module. An operator of the loop, and whoever speaks to a terminal that may be gone.

    Args:
        say: tells the person a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._phase = STARTING
        self._number: int | None = None  # of the signal that ended it
        self._asked: float | None = None  # when the end was asked for first
        self._cut_short = False
        self._failure: Exception | None = None
        self._before: dict[int, Any] = {}
        self._lines: Lines | None = None  # once the loop runs
        self._is_suspended = False  # somebody has asked for it, and is to be told

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is threading.main_thread():
            for number in (*SIGNALS, *([] if SUSPEND is None else [SUSPEND])):
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:  # as `nohup` and shells set it for what is to go on
                    self._before[number] = before
                    signal.signal(number, self._on_suspend if number == SUSPEND else self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, before in self._before.items():  # The program ends now, where a signal has said so.
            signal.signal(number, before if self._number is None else signal.SIG_IGN)
        if self._lines is not None:
            self._lines.flush(TELL_SECONDS)
            self._lines.close()
            self._lines = None

    def _on_suspend(self, number: int, _: FrameType | None) -> None:
        self._is_suspended = True

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._phase == STARTING:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        is_again = self._asked is not None and time.monotonic() - self._asked >= AGAIN and number != HANG_UP
        self._note(number)
        if is_again and self._phase != CLOSING:
            self._cut_short = True
            if self._phase == FINISHING:
                self._phase = CLOSING
                raise CutShortError

    def _note(self, number: int) -> None:
        self._number = self._number or number
        self._asked = self._asked or time.monotonic()

    # --- while it runs ------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Tell the person, without waiting once the loop runs; a lost terminal ends the run as its signal does."""
        if self._lines is None:
            self._tell(text)
        else:
            self._lines.put(text)

    def _tell(self, text: str) -> None:
        try:
            self._say(text)
        except OSError as error:
            if self._number is None:
                _log.warning("the terminal is gone: %s", error)
            self._note(HANG_UP)

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """The end of the loop, once it was asked for."""
        if self._is_suspended:
            self._is_suspended = False
            self.say("Ctrl-Z does nothing here: a suspended process brakes nothing. Ctrl-C ends it")
        return OperatorCommand(finished=self._number is not None)

    def run(self, loop: ControlLoop) -> None:
        """Run the loop until it has ended and the robot stands. An error of it is told, and kept for `exit`."""
        self._phase, self._lines = RUNNING, Lines(self._tell)
        try:
            loop.run()
        except Exception as error:  # whatever it is, the recording comes first; `exit` raises it
            self._failure = error
            self.say(f"the control loop failed: {type(error).__name__}: {error}")
        self._asked = self._asked or time.monotonic()
        because = "" if self._number is None else f" ({signal.Signals(self._number).name})"
        self.say(f"stopped{because}: the robot was told to stand")

    def finish(self, recordings: ExitStack, seconds: Callable[[], float] | None = None) -> None:
        """Finish what is recorded; a second signal cuts that short. Nothing more can be interrupted afterwards.

        Args:
            recordings: closes the recorder, then its recording.
            seconds: about how long that takes; None where nothing is recorded.
        """
        try:
            self._phase = FINISHING
            if self._cut_short:
                raise CutShortError
            if seconds is not None:
                self.say(f"finishing the recording: about {max(1, round(seconds()))} s (Ctrl-C leaves it unfinished)")
            recordings.close()
            self._phase = CLOSING
        except CutShortError:
            recordings.pop_all()
            self.say("the recording was cut short: `vla-rl import` makes a dataset of its whole episodes")
        finally:
            self._phase = CLOSING
            if self._lines is not None:
                self._lines.flush(TELL_SECONDS)

    def exit(self, is_complete: bool) -> None:
        """Raise what the program ends with.

        Args:
            is_complete: a Ctrl-C has left nothing undone; the exit code is 0 then.

        Raises:
            SystemExit: with 128 and the signal's number. Exception: what the loop failed with.
        """
        if self._failure is not None:
            raise self._failure
        is_meant = self._number == signal.SIGINT and is_complete and not self._cut_short
        if self._number is not None and not is_meant:
            raise SystemExit(128 + self._number)
