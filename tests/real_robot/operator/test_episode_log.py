"""What is written of a person's episodes: how each ended, who drove, and which ticks were late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import HOLDING, RUNNING, SentCommand
from real_robot.operator import episode_log
from real_robot.operator.episode_log import EpisodeLog
from real_robot.operator.intervention import Intervention
from real_robot.types import Command, RobotObservation
from vla_rl.config import ConfigError

SEEN = RobotObservation({}, np.zeros(1, np.float32), "push", 0.0)


class Bench:
    """A loop of 10 Hz whose ticks come when the test says."""

    def __init__(self, file: Path) -> None:
        self.now, self.file, self.must_begin = 0.0, file, False
        self.episode = Intervention(["velocity"], clock=lambda: self.now)
        self.book = EpisodeLog(file, self.episode, rate=10)

    def ticks(self, source: str, *gaps: float) -> None:
        for gap in gaps:
            self.now += gap
            command = Command(np.zeros(1, np.float32), source, self.now)
            mode = HOLDING if source == "hold" else RUNNING
            sent = SentCommand(command.values, command.values, (), mode, command.values)
            told, self.must_begin = OperatorCommand(begin=self.must_begin), False
            self.book(Tick(0, self.now, SEEN, True, command, sent, 0.0, 0.0, told))

    def begin(self) -> None:
        self.episode.begin("anna")
        self.must_begin = True

    def entries(self) -> list[dict]:
        self.book.flush()
        return json.loads(self.file.read_text())


def test_an_episode_with_a_person_and_one_without(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "results.json")
    assert bench.entries() == []
    bench.begin()
    bench.ticks("policy", 0.1, 0.1, 0.1)
    bench.episode.alarm("failure score 3")
    bench.ticks("hold", 0.1, 0.4)
    bench.episode.take_over("anna")
    bench.ticks("recovery", 0.1, 0.1)
    bench.episode.success("/outcome")
    assert bench.entries() == [], "not before the tick after"
    bench.ticks("hold", 0.1)
    (entry,) = bench.entries()
    assert entry["outcome"] == "success" and entry["by"] == "/outcome" and entry["instruction"] == "push"
    assert (entry["interventions"], entry["alarms"], entry["ticks"], entry["late"]) == (1, 1, 7, 1)
    assert entry["driven"] == {"policy": 0.2, "hold": 0.6, "recovery": 0.2} and entry["seconds"] == 1.0

    bench.begin()
    bench.ticks("policy", 0.1, 0.1)
    bench.book.close()
    bench.book.close()
    assert [e["outcome"] for e in bench.entries()] == ["success", None]


def test_an_end_and_a_label_between_two_ticks_belong_to_their_episode(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "results.json")
    bench.begin()
    bench.ticks("policy", 0.1, 0.1)
    bench.episode.success("anna")
    bench.begin()
    bench.ticks("policy", 0.1, 0.1)
    bench.episode.take_over("bert")
    bench.episode.recovery_done("bert")
    bench.episode.correction_done("bert")
    bench.ticks("hold", 0.1)
    bench.episode.failure("bert")
    bench.begin()
    bench.ticks("policy", 0.1)
    told = [(entry["outcome"], entry["by"], entry["interventions"]) for entry in bench.entries()]
    assert told == [("success", "anna", 0), ("failure", "bert", 1)]


def test_an_earlier_runs_episodes_stay(tmp_path: Path) -> None:
    """As a recording goes on after a crash, with the same command."""
    for number in range(2):
        bench = Bench(tmp_path / "results.json")
        assert len(bench.entries()) == number
        bench.episode.begin("anna")
        bench.episode.failure("anna")  # Before any tick: none is booked, and no entry is changed.
        bench.ticks("hold", 0.1)
        bench.begin()
        bench.ticks("policy", 0.1)
        bench.episode.success("anna")
        bench.ticks("hold", 0.1)
        bench.book.close()
    assert [entry["outcome"] for entry in bench.entries()] == ["success", "success"]
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"--results: .*notes\.json holds something else"):
        Bench(tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'


def test_a_label_that_comes_after_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "results.json")
    bench.begin()
    bench.ticks("policy", 0.1)
    bench.episode.take_over("anna")
    bench.episode.recovery_done("anna")
    bench.episode.correction_done("anna")
    bench.ticks("hold", 0.1)
    assert [e["outcome"] for e in bench.entries()] == [None]
    bench.episode.failure("anna")
    bench.ticks("hold", 0.1)
    assert [e["outcome"] for e in bench.entries()] == ["failure"]


def test_no_tick_waits_for_the_disk_and_a_full_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path / "results.json")
    write, writers = episode_log.write_text_atomic, []
    freed = threading.Event()

    def slow(file: Path, text: str) -> None:
        writers.append(threading.current_thread())
        freed.wait(60)
        write(file, text)

    monkeypatch.setattr(episode_log, "write_text_atomic", slow)
    bench.begin()
    bench.ticks("policy", 0.1)
    bench.episode.success("anna")
    bench.ticks("hold", 0.1)  # Here it ends.
    freed.set()
    bench.book.close()
    assert [e["outcome"] for e in bench.entries()] == ["success"]
    assert writers and threading.current_thread() not in writers

    bench.begin()
    bench.ticks("policy", 0.1)
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.json").mkdir()  # What cannot be replaced by a file.
    with pytest.raises(OSError, match=r"results\.json"):
        bench.book.close()


KILLED = """
import sys
from pathlib import Path
from test_episode_log import Bench

bench = Bench(Path(sys.argv[1]))
for number in range(1, 100_000):
    bench.begin()
    bench.ticks("policy", 0.1)
    bench.episode.success("anna")
    bench.ticks("hold", 0.1)  # Here it ends, and a thread writes it.
    if number % 10 == 0:
        bench.book.flush()
        print(number, flush=True)
"""


def test_a_process_that_is_killed_leaves_each_episode_that_was_written(tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parents[2])))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "results.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as child:
        assert child.stdout is not None
        written = 0
        while written < 50:
            written = int(child.stdout.readline())
        child.kill()  # in the middle of the next ones
    entries = json.loads((tmp_path / "results.json").read_text())
    assert len(entries) >= written and all(entry["outcome"] == "success" for entry in entries)
