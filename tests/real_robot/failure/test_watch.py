"""A fitted detector beside the loop: alarms pause, a rewind ends when it is quiet, and what goes wrong is told."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from watch_bench import CHUNK, HASH, PATIENCE, Walker, WatchBench, served, watch_bench
from watch_bench import fitted as fit_detector

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.failure.detector import DetectorError, FailureDetector, Score
from real_robot.failure.watch import FailureWatch, load_detector
from real_robot.operator.intervention import Intervention
from real_robot.serving.client import PolicyClient
from real_robot.types import RobotObservation


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ot", reason="POT is not installed: pip install '.[robot]'")
    return fit_detector(tmp_path_factory.mktemp("detector"))


class Blocked:
    """In place of a scorer: waits at a gate, or raises."""

    kind = "blocked"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.gate = error, threading.Event()

    def start(self) -> None:
        pass

    def step(self, embedding: np.ndarray) -> float:
        if self.error is not None:
            raise self.error
        assert self.gate.wait(PATIENCE)
        return 0.0


def test_a_good_episode_is_scored_once_a_chunk_and_left_alone(fitted: Path) -> None:
    policy = Walker()
    with watch_bench(fitted, policy) as bench:
        bench.walk(7 * CHUNK + 2)
        scores = bench.scores()
        assert len(scores) == policy.num_embedded == 8
        assert all(0 <= value <= limit for value, limit in scores), scores
        assert bench.intervention.state == "autonomous" and not bench.told
        assert bench.watch.score == scores[-1]
        assert bench.console_state.facts()["detector"] == "float_ot"


def test_an_alarm_pauses_the_policy_and_the_rewind_ends_when_the_detector_is_quiet(fitted: Path) -> None:
    policy = Walker()
    with watch_bench(fitted, policy) as bench:
        bench.walk(3 * CHUNK)
        policy.astray = True
        bench.run_until("paused")
        transition = bench.intervention.summary.transitions[-1]
        assert transition.event == "alarm" and "above its threshold" in transition.reason
        value, limit = bench.scores()[-1]
        assert value > limit
        assert bench.tick(2).requested.source == "hold", "the robot stands until somebody decides"  # type: ignore[union-attr]
        farthest = bench.robot.position[1]
        bench.intervention.rewind("anna")
        bench.run_until("paused")
        assert bench.intervention.summary.transitions[-1].event == "all_clear"
        assert bench.intervention.path_length > 0, "before the path's start"
        assert bench.robot.position[1] < farthest - 0.01
        score = bench.thread.latest()
        assert score is not None and score.is_quiet(0.5) and score.center < score.threshold

        bench.intervention.resume("anna")  # It goes astray again, and is caught again.
        bench.run_until("paused")
        assert bench.intervention.summary.alarms == 2


def test_a_rewind_that_no_alarm_asked_for_goes_on_until_the_person_ends_it(fitted: Path) -> None:
    with watch_bench(fitted, Walker()) as bench:
        bench.walk(3 * CHUNK)
        bench.intervention.rewind("anna")
        bench.tick(2 * CHUNK)
        assert bench.intervention.state == "rewinding"


def test_who_lets_the_policy_go_on_is_not_asked_again_about_the_same_rise(fitted: Path) -> None:
    policy = Walker()
    policy.astray = True
    with watch_bench(fitted, policy) as bench:
        bench.run_until("paused")
        bench.intervention.resume("anna")
        bench.tick(3 * CHUNK)
        assert bench.intervention.state == "autonomous"
        assert all(value > limit for value, limit in bench.scores()[-2:])
        bench.intervention.failure("anna")
        bench.tick(2)
        bench.intervention.begin("anna")  # A new episode is asked about anew.
        bench.run_until("paused")
        assert bench.intervention.summary.alarms == 1


def test_the_last_episodes_score_does_not_pause_one_whose_scene_is_laid_out() -> None:
    """The person had paused before the score rose, so that nobody was asked; the next episode begins after a while."""
    high = Score(2.0, 1.0, True, 0)
    thread: Any = SimpleNamespace(latest=lambda: high, seconds_behind=lambda: 0.0, reset=lambda text: None)
    it = Intervention(["velocity"])
    watch = FailureWatch(thread, 8, HASH, lambda *_: {}, dict, it)

    def tick(told: OperatorCommand) -> None:
        watch(Tick(0, 0.0, None, False, None, None, 0.0, 0.0, told))

    it.begin("anna")
    tick(it.poll())
    watch.place(RobotObservation({}, np.zeros(2, np.float32), "go", 0.0))
    it.pause("anna")
    tick(it.poll())
    it.failure("anna")
    it.begin("anna")
    assert it.poll().begin
    tick(OperatorCommand(active=False))  # As `SceneReset` says until the service has answered.
    assert it.state == "autonomous" and it.summary.alarms == 0
    tick(OperatorCommand(begin=True))
    assert it.state == "autonomous"


def test_chunks_that_are_computed_meanwhile_are_scored_once_in_each_stretch(fitted: Path) -> None:
    """Asynchronous execution asks for many more chunks than the detector was fitted on."""
    policy = Walker()
    with watch_bench(fitted, policy, "execution.refill_at=null", asynchronous=True) as bench:
        bench.walk(6 * CHUNK)
        assert 5 <= policy.num_embedded <= 7
        assert bench.intervention.state == "autonomous"
        policy.astray = True
        bench.run_until("paused", 400)
        assert bench.intervention.summary.alarms == 1


def test_a_detector_that_hangs_delays_no_tick_and_is_an_alarm(fitted: Path) -> None:
    scorer = Blocked()
    with watch_bench(fitted, Walker(), "failure.patience=0.2", scorer=scorer) as bench:
        for _ in range(400):  # None of these can wait for the detector, which does not answer.
            bench.tick(wait=False)
            if bench.intervention.state == "paused":
                break
            threading.Event().wait(0.01)
        assert bench.intervention.state == "paused"
        assert bench.loop.step > CHUNK and bench.scores() == []
        assert bench.told == ["failure detector: no answer for 0.2 s"]
        assert bench.intervention.summary.transitions[-1].reason == bench.told[0]
        scorer.gate.set()


def test_a_detector_that_raises_is_told_and_is_an_alarm_in_each_episode(fitted: Path) -> None:
    with watch_bench(fitted, Walker(), scorer=Blocked(ArithmeticError("out of numbers"))) as bench:
        for episode in (1, 2):
            bench.run_until("paused")
            assert len(bench.told) == episode and "ArithmeticError: out of numbers" in bench.told[-1]
            assert bench.intervention.summary.alarms == 1 and bench.watch.score is None
            bench.intervention.resume("anna")  # A person may go on without it.
            bench.tick(3 * CHUNK)
            assert bench.intervention.state == "autonomous"
            bench.intervention.failure("anna")
            bench.tick(2)
            bench.intervention.begin("anna")


def test_another_checkpoint_behind_the_same_address_is_an_alarm(fitted: Path) -> None:
    with ExitStack() as stack:
        with served(Walker()) as port:
            bench = WatchBench(fitted, port, stack)
            bench.intervention.begin("anna")
            bench.walk(2 * CHUNK)
        assert bench.intervention.state == "autonomous" and len(bench.scores()) == 2
        with served(Walker(), policy_hash="7" * 64, port=port):
            bench.run_until("paused")
        assert "now serves 777777777777" in bench.told[0] and "555555555555" in bench.told[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy_hash": "7" * 64}, ["555555555555", "777777777777", "vla-rl failure fit"]),
        ({"policy_hash": ""}, ["does not tell its policy's hash", "vla-rl serve"]),
        ({"can_embed": False}, ["gives no embeddings", "--detector"]),
    ],
)
def test_a_server_that_the_detector_does_not_fit_is_refused(
    fitted: Path, options: dict[str, Any], words: list[str]
) -> None:
    with (
        served(Walker(), **options) as port,
        PolicyClient(f"127.0.0.1:{port}") as client,
        pytest.raises(DetectorError) as refusal,
    ):
        load_detector(fitted, client.address, client.metadata)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_folder_of_several_detectors_is_told(fitted: Path) -> None:
    with pytest.raises(DetectorError, match=r"several detectors; choose one: .*float_ot"):
        FailureDetector.load(fitted.parent.parent, HASH)
