"""Signals to this very process, and a reader that goes away: what `Shutdown` makes of them."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest

from real_robot.control import shutdown
from real_robot.control.shutdown import Shutdown


class Loop:
    """Gets signals while it brakes."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers, self.has_braked = numbers, False

    def run(self) -> None:
        for number in self.numbers:
            os.kill(os.getpid(), number)
        self.has_braked = True


def test_no_signal_is_let_into_the_braking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "AGAIN", 0.0)
    told: list[str] = []
    loop, closed = Loop(signal.SIGTERM, signal.SIGINT, signal.SIGTERM), []
    recordings = ExitStack()
    recordings.callback(lambda: closed.append(True))
    with Shutdown(told.append) as ending:
        ending.run(loop)
        assert loop.has_braked and ending.poll(None).finished
        ending.finish(recordings, lambda: 7.0)
    assert "cut short" in told[-1] and not closed, "the second signal is about the recording"
    with pytest.raises(SystemExit) as ended:
        ending.exit(is_complete=True)
    assert ended.value.code == 143


def test_one_signal_leaves_the_recording_its_time() -> None:
    told: list[str] = []
    closed: list[bool] = []
    recordings = ExitStack()
    recordings.callback(lambda: closed.append(True))
    with Shutdown(told.append) as ending:
        ending.run(Loop(signal.SIGTERM))
        ending.finish(recordings, lambda: 7.0)
    assert closed == [True] and "about 7 s" in told[-1]


def test_a_reader_that_is_gone_ends_the_run_as_a_lost_terminal_does() -> None:
    """`vla-rl deploy | tee log`, where tee is killed: no signal comes."""
    reading, writing = os.pipe()
    os.close(reading)

    def say(text: str) -> None:
        os.write(writing, text.encode())

    with Shutdown(say) as ending:
        assert not ending.poll(None).finished
        ending.say("safety: running")
        assert ending.poll(None).finished
    os.close(writing)
    with pytest.raises(SystemExit) as ended:
        ending.exit(is_complete=True)
    assert ended.value.code == 129


def test_an_error_of_the_loop_comes_after_the_recording() -> None:
    class Failing:
        def run(self) -> None:
            raise RuntimeError("an observer fell over")

    told: list[str] = []
    closed: list[bool] = []
    recordings = ExitStack()
    recordings.callback(lambda: closed.append(True))
    with Shutdown(told.append) as ending:
        ending.run(Failing())
        ending.finish(recordings, lambda: 1.0)
    assert closed == [True] and told[0] == "the control loop failed: RuntimeError: an observer fell over"
    with pytest.raises(RuntimeError, match="fell over"):
        ending.exit(is_complete=True)
