"""Better or worse than the episode before: what a person says at the console, kept with the recording."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_recorder import ALONE, FAILED, Bench

from real_robot.contract.load import load_contract
from real_robot.contract.sections import TeleopConfig
from real_robot.operator.console.operator import ConsoleOperator, ConsoleState
from real_robot.operator.episode_log import Comparisons
from real_robot.operator.intervention import InterventionError
from real_robot.operator.recorder import RecordingError, finish
from real_robot.operator.teleop import Teleoperation
from vla_rl.data.lerobot_io import PREFERENCES


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "the writer does not store the episode"
        time.sleep(0.01)


class Compared(Bench):
    """A recorded robot whose person is asked after each episode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.comparisons = Comparisons(self.recorder)

    def run(self, *steps: str) -> None:
        """An episode, until it is stored."""
        number = len(self.recorder.stored)
        self.episode(*steps)
        until(lambda: len(self.recorder.stored) > number)

    def finished(self, folder: Path) -> list[dict[str, object]]:
        self.comparisons.close()
        self.recorder.close()
        self.recording.close()
        file = folder / PREFERENCES
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_choices_become_a_file_of_the_dataset_by_its_episodes(tmp_path: Path) -> None:
    bench = Compared(tmp_path / "set")
    assert not bench.comparisons.can_compare
    bench.run(*FAILED)
    assert not bench.comparisons.can_compare, "there is none before it"
    with pytest.raises(InterventionError, match="once two of the same instruction are labeled and recorded"):
        bench.comparisons.compare(True, "anna")
    bench.run(*ALONE)
    bench.comparisons.compare(False, "anna")
    bench.comparisons.compare(True, "bo")  # The later word counts.
    bench.episode("begin", "1")
    assert not bench.comparisons.can_compare, "an episode runs"
    bench.run("failure", "1")
    bench.comparisons.compare(False, "anna")
    assert bench.finished(tmp_path / "set") == [
        {"better": 1, "worse": 0, "by": "bo"},
        {"better": 1, "worse": 2, "by": "anna"},
    ]


def test_episodes_of_one_instruction_are_compared(tmp_path: Path) -> None:
    bench = Compared(tmp_path / "set")
    bench.run(*ALONE)
    bench.instruction = "stack"
    bench.run(*ALONE)
    assert not bench.comparisons.can_compare
    bench.instruction = "push"
    bench.run(*FAILED)
    bench.comparisons.compare(False, "anna")
    assert bench.finished(tmp_path / "set") == [{"better": 0, "worse": 2, "by": "anna"}]


def test_an_episode_without_a_label_is_not_compared(tmp_path: Path) -> None:
    bench = Compared(tmp_path / "set")
    bench.run(*ALONE)
    bench.episode("begin", "2", "pause", "take_over", "2", "recovery_done", "1", "correction_done", "1")
    assert not bench.comparisons.can_compare
    bench.run("success", "1")
    assert bench.comparisons.can_compare
    assert bench.finished(tmp_path / "set") == [], "nobody has chosen"


def test_choices_outlive_a_crash_and_count_the_episodes_that_are_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    bench = Compared(folder)
    for episode in (ALONE, FAILED, ALONE):
        bench.run(*episode)
    bench.comparisons.compare(True, "anna")
    bench.comparisons.close()
    bench.recorder.close()
    staging = bench.recording.staging
    for item in (staging / "shard_00000").iterdir():
        item.unlink()
    (staging / "shard_00000").rmdir()
    again = Compared(folder)  # The process has ended; another goes on.
    again.run(*FAILED)
    assert not again.comparisons.can_compare, "its own episodes alone are known by their instruction"
    again.run(*ALONE)
    again.comparisons.compare(True, "anna")
    assert again.finished(folder) == [
        {"better": 1, "worse": 0, "by": "anna"},
        {"better": 3, "worse": 2, "by": "anna"},
    ]


def test_the_console_has_the_buttons_where_there_are_two_to_compare(tmp_path: Path) -> None:
    contract, bench = load_contract("sim_robot"), Compared(tmp_path / "set")
    console_state = ConsoleState(contract)
    console = ConsoleOperator(bench.it, Teleoperation(TeleopConfig(), contract.safety), console_state)
    with pytest.raises(InterventionError, match="nothing is recorded; deploy with --record"):
        console.press("better", "anna")
    console.comparisons = bench.comparisons
    bench.run(*ALONE)
    assert not {"better", "worse"} & set(console.allowed())
    bench.run(*FAILED)
    assert {"better", "worse", "start"} <= set(console.allowed())
    console.press("worse", "anna")
    assert bench.finished(tmp_path / "set") == [{"better": 0, "worse": 1, "by": "anna"}]


def test_a_damaged_file_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    bench = Compared(tmp_path / "set")
    bench.run(*ALONE)
    bench.run(*ALONE)
    file = bench.recording.staging / PREFERENCES
    for text in ('{"better": 3}\n', '{"better": [1], "worse": 0}\n', '{"better": 3, "wor'):
        file.write_text(text)
        with pytest.raises(RecordingError, match=r"preferences\.jsonl: .*Mend that line, or move the file away"):
            Comparisons(bench.recorder)
    bench.recorder.close()
    with pytest.raises(RecordingError, match=r"preferences\.jsonl.*Mend that line, or move the file away"):
        bench.recording.close()
    file.unlink()
    assert finish(tmp_path / "set")["episodes"] == 2


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    bench = Compared(tmp_path / "set")
    bench.run(*ALONE)
    bench.run(*ALONE)
    (bench.recording.staging / PREFERENCES).mkdir()  # Nothing can be written over it.
    bench.comparisons.compare(True, "anna")
    bench.comparisons.close()
    assert "which episodes are better is not kept" in bench.problems[-1]
