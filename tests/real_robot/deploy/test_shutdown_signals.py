"""Signals to this very process, and a reader that goes away: what `Shutdown` makes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from processes import ROOT

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


def test_a_terminal_that_stands_does_not_hold_up_the_loop() -> None:
    """Ctrl-S, or a pipe whose reader stands: what is told waits there, a control tick never does."""
    reached, flows, told = threading.Event(), threading.Event(), list[str]()

    def say(text: str) -> None:
        reached.set()
        assert flows.wait(60)
        told.append(text)

    class Ticking:
        def __init__(self, ending: Shutdown) -> None:
            self.ending, self.ticks = ending, 0

        def run(self) -> None:
            for self.ticks in range(1, 4):
                self.ending.say(f"safety: tick {self.ticks}")
                assert reached.wait(60)

    with Shutdown(say) as ending:
        loop = Ticking(ending)
        thread = threading.Thread(target=ending.run, args=[loop], daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and loop.ticks == 3 and not told
        flows.set()
        ending.finish(ExitStack())
    assert told == ["safety: tick 1", "safety: tick 2", "safety: tick 3", "stopped: the robot was told to stand"]


@pytest.mark.skipif(not hasattr(signal, "SIGTSTP"), reason="POSIX")
def test_ctrl_z_does_not_suspend_a_loop_and_ctrl_backslash_brakes() -> None:
    """A suspended process brakes nothing; nor does one that SIGQUIT ends at once."""
    code = (
        "import os, signal, sys\n"
        "from contextlib import ExitStack\n"
        "from real_robot.control.shutdown import Shutdown\n"
        "class Loop:\n"
        "    def run(self):\n"
        "        os.kill(os.getpid(), signal.SIGTSTP)\n"
        "        assert not ending.poll(None).finished\n"
        "        os.kill(os.getpid(), signal.SIGQUIT)\n"
        "        assert ending.poll(None).finished\n"
        "for number in (signal.SIGTSTP, signal.SIGQUIT):\n"
        "    signal.signal(number, signal.SIG_DFL)  # the tests may run in the background of a shell\n"
        "with Shutdown(lambda text: print(text, flush=True)) as ending:\n"
        "    ending.run(Loop())\n"
        "    ending.finish(ExitStack())\n"
        "ending.exit(is_complete=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        told = child.communicate(timeout=60)[0].splitlines()
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 131
    assert told == [
        "Ctrl-Z does nothing here: a suspended process brakes nothing. Ctrl-C ends it",
        "stopped (SIGQUIT): the robot was told to stand",
    ]


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
