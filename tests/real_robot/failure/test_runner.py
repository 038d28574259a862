"""The thread keeps up with the newest embedding, never blocks its caller, and turns errors into alarms."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from real_robot.failure import watch
from real_robot.failure.conformal import ALL, Band, Shape
from real_robot.failure.detector import FailureDetector, Identity, Score
from real_robot.failure.scorer import Scorer, Tensors
from real_robot.failure.watch import DetectorThread
from vla_rl.data.embeddings import EmbeddedEpisodes

PATIENCE = 20.0  # Seconds; far beyond what any of this takes.


class Summed(Scorer):
    """The sum of the embeddings' first numbers; waits at a gate, and fails on a negative one."""

    kind = "summed"

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.start()

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        raise NotImplementedError("not fitted here")

    def start(self) -> None:
        self.total = 0.0

    def step(self, embedding: np.ndarray) -> float:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if embedding[0] < 0:
            raise ArithmeticError("negative")
        self.total += float(embedding[0])
        return self.total

    def tensors(self) -> Tensors:
        return {}

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls()


@pytest.fixture
def scorer() -> Summed:
    return Summed()


@pytest.fixture
def thread(scorer: Summed) -> Iterator[DetectorThread]:
    band = Band({ALL: Shape(np.zeros(1), np.ones(1))}, 3.5, 0.1, 19)
    with DetectorThread(FailureDetector(scorer, band, Identity("h", "toy", 1, 8))) as running:
        running.reset("go")
        yield running
        scorer.gate.set()


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def test_scores_arrive_and_a_new_episode_begins_at_zero(thread: DetectorThread) -> None:
    assert thread.latest() is None
    for number in range(4):
        assert thread.submit(one(1)) == number
        assert thread.wait(PATIENCE)
    assert thread.latest() == Score(4.0, 3.5, True, 3)
    thread.reset("again")
    assert thread.latest() is None
    thread.submit(one(1))
    assert thread.wait(PATIENCE)
    assert thread.latest() == Score(1.0, 3.5, False, 0)


def test_the_newest_embedding_replaces_one_that_waits_and_the_count_holds(
    thread: DetectorThread, scorer: Summed
) -> None:
    scorer.gate.clear()
    thread.submit(one(1))
    assert scorer.entered.wait(PATIENCE)
    for value in (10, 20, 0.5):  # None of these waits for the detector.
        thread.submit(one(value))
    scorer.gate.set()
    assert thread.wait(PATIENCE)
    score = thread.latest()
    assert score is not None
    assert score.number == 3
    assert score.value == 1 + 3 * 0.5  # The newest stands for the two that were dropped.


def test_a_score_of_the_old_episode_is_discarded(thread: DetectorThread, scorer: Summed) -> None:
    scorer.gate.clear()
    thread.submit(one(100))
    assert scorer.entered.wait(PATIENCE)
    thread.reset("next")
    scorer.gate.set()
    assert thread.wait(PATIENCE)
    assert thread.latest() is None


def test_an_error_is_an_alarm_until_the_next_episode(thread: DetectorThread) -> None:
    for value in (-1, 1):
        thread.submit(one(value))
        assert thread.wait(PATIENCE)
    score = thread.latest()
    assert score is not None
    assert score.alarm
    assert score.reason == "ArithmeticError: negative"
    thread.reset("next")
    thread.submit(one(1))
    assert thread.wait(PATIENCE)
    assert thread.latest() == Score(1.0, 3.5, False, 0)


def test_chunks_that_are_rewound_are_forgotten(thread: DetectorThread, scorer: Summed) -> None:
    for _ in range(5):
        thread.submit(one(1))
        assert thread.wait(PATIENCE)
    thread.rewind(2)
    assert thread.wait(PATIENCE)
    assert thread.latest() == Score(2.0, 3.5, False, 1)
    scorer.gate.clear()
    scorer.entered.clear()
    thread.submit(one(0.25))
    assert scorer.entered.wait(PATIENCE)
    thread.rewind(1)
    assert thread.submit(one(0.5)) == 1  # Takes the rewind's place, and does what it asked for.
    scorer.gate.set()
    assert thread.wait(PATIENCE)
    assert thread.latest() == Score(1.5, 3.5, False, 1)


def test_how_long_it_has_been_silent(thread: DetectorThread, scorer: Summed) -> None:
    assert thread.seconds_behind() == 0
    scorer.gate.clear()
    thread.submit(one(1))
    assert scorer.entered.wait(PATIENCE)
    assert thread.seconds_behind() > 0
    thread.reset("next")
    assert thread.seconds_behind() == 0, "the old episode's work is not the new one's delay"
    thread.submit(one(1))
    assert thread.seconds_behind() > 0
    scorer.gate.set()
    assert thread.wait(PATIENCE)
    assert thread.seconds_behind() == 0


def test_one_that_hangs_in_an_old_episodes_work_is_silent_in_the_next_one_too(
    thread: DetectorThread, scorer: Summed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New embeddings take one another's place while it hangs: none of them is an answer."""
    now = [1000.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    scorer.gate.clear()
    thread.submit(one(1))
    assert scorer.entered.wait(PATIENCE)
    thread.reset("next")
    thread.submit(one(1))
    for number in range(3):
        now[0] += 2.0
        thread.submit(one(1))
        assert thread.seconds_behind() == 2.0 * (number + 1), "it took another's place, and its silence with it"
    scorer.gate.set()
    assert thread.wait(PATIENCE)
    assert thread.seconds_behind() == 0


def test_a_closed_thread_takes_nothing(thread: DetectorThread) -> None:
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError, match="was closed"):
        thread.submit(one(1))
