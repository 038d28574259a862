"""Recordings: what a frame holds, whole after a crash, bounded, and what training takes of them."""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import HOLDING, RUNNING, SentCommand
from real_robot.operator.intervention import Intervention
from real_robot.operator.recorder import ASSEMBLING, Recorder, Recording, RecordingError, finish, staging_folder
from real_robot.operator.sim_episodes import SimEpisodes
from real_robot.transports.messages import String
from real_robot.types import Command, RobotObservation
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.data.lerobot_io import read_shards
from vla_rl.types import CONTROL_SOURCES, EpisodeSpec

NEEDS = DataNeeds(cameras=("top",), action_dim=2, state_dim=3, fps=10)


class Bench:
    """An intervention and its recorder, ticked by hand. The state's first number counts the ticks."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now, self.problems, self.instruction = 0.0, list[str](), "push"
        self.recording = Recording(folder, 10, "toy", self.problems.append)
        self.it = Intervention(("velocity", "position"), clock=lambda: self.now)
        self.recorder = Recorder(self.recording, self.it, **options)

    def tick(self, action: float = 0.0, size: int = 8) -> None:
        image = np.full((size, size, 3), int(self.now) % 256, np.uint8)
        observation = RobotObservation(
            {"top": image}, np.array([self.now, 0, 0], np.float32), self.instruction, self.now
        )
        self.it.give(np.array([action, 1.0]))
        operator_command = self.it.poll(observation)
        requested = operator_command.command or Command(np.array([action, 1.0], np.float32), "policy", self.now)
        sent = None
        if operator_command.active:
            mode = HOLDING if requested.source == "hold" else RUNNING
            sent = SentCommand(requested.values / 2, requested.values, (), mode, requested.values / 2)
        tick = Tick(
            0,
            self.now,
            observation,
            True,
            requested if operator_command.active else None,
            sent,
            0.0,
            0.0,
            operator_command,
        )
        self.it(tick)
        self.recorder(tick)
        self.now += 1

    def episode(self, *steps: str) -> None:
        """Letters: a tick each; names: events."""
        for step in steps:
            if step.isdigit():
                for _ in range(int(step)):
                    self.tick(action=self.now / 100)
            else:
                getattr(self.it, step)("ann")


HELPED = ("begin", "2", "pause", "3", "take_over", "2", "recovery_done", "1", "correction_done", "1", "success", "1")
ALONE = ("begin", "3", "success", "1")
FAILED = ("begin", "2", "failure", "1")


def record(folder: Path, *episodes: tuple[str, ...], **options: Any) -> Bench:
    bench = Bench(folder, **options)
    for episode in episodes:
        bench.episode(*episode)
    bench.recorder.close()
    return bench


def test_frames_say_who_was_in_control_and_training_takes_the_right_ones(tmp_path: Path) -> None:
    bench = record(tmp_path / "set", HELPED, ALONE, FAILED, policy_version="v1", round=3)
    assert bench.recording.close() == {"episodes": 3, "frames": 10} and not bench.problems
    assert not staging_folder(tmp_path / "set").exists()

    data = open_dataset(DatasetConfig(path=str(tmp_path / "set"), frames="rac"), NEEDS)
    names = [CONTROL_SOURCES[i] for i in data.source]
    assert names == ["policy"] * 2 + ["recovery"] * 2 + ["correction"] + ["policy"] * 5
    # Ticks 2 to 4 were a hold: nothing was followed, so there is no frame of them.
    np.testing.assert_allclose(data.state[:5, 0], [0, 1, 5, 6, 7])
    np.testing.assert_allclose(data.actions[:5, 0], np.array([0.0, 0.01, 0.05, 0.06, 0.07]) / 2)  # What was sent.
    np.testing.assert_array_equal(data.executed_actions, data.actions)
    assert data.final_state is not None and data.final_state[0, 0] == 8  # After the last action.
    assert list(data.success) == [True, True, False]
    assert list(data.rows) == [2, 3, 4, 5, 6, 7]
    assert data.batch(np.array([3]), 4).valid.tolist() == [[True, True, False, False]]

    person = open_dataset(DatasetConfig(path=str(tmp_path / "set"), frames="hg_dagger"), NEEDS)
    assert list(person.rows) == [2, 3, 4]
    everything = open_dataset(DatasetConfig(path=str(tmp_path / "set")), NEEDS)
    assert len(everything.rows) == 10

    import pyarrow.parquet as pq

    rows = pq.read_table(str(tmp_path / "set" / "meta" / "episodes")).to_pylist()
    assert [(r["interventions"], r["recoveries"], r["round"]) for r in rows] == [(1, 1, 3), (0, 0, 3), (0, 0, 3)]
    frames = pq.read_table(str(tmp_path / "set" / "data")).column("policy_version").to_pylist()
    assert set(frames) == {"v1"}


def test_a_detectors_scores_are_recorded_and_training_does_not_mind(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    scores = iter([None, None, (0.5, 2.0), (0.75, 2.0), (1.0, 2.5)])
    bench = record(tmp_path / "set", ALONE, FAILED, failure_score=lambda: next(scores))
    assert bench.recording.close() == {"episodes": 2, "frames": 5} and not bench.problems
    frames = pq.read_table(str(tmp_path / "set" / "data")).to_pandas()
    np.testing.assert_array_equal(frames["failure_score"], [np.nan, np.nan, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(frames["failure_threshold"], [np.nan, np.nan, 2, 2, 2.5])
    assert len(open_dataset(DatasetConfig(path=str(tmp_path / "set")), NEEDS).rows) == 5
    stats = (tmp_path / "set" / "meta" / "stats.json").read_text()
    assert "failure_score" not in stats and "NaN" not in stats

    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    item = LeRobotDataset("local/set", root=tmp_path / "set")[4]
    assert item["failure_score"] == 1.0 and item["failure_threshold"] == 2.5


def test_a_crash_loses_the_episode_under_way_alone(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    bench = Bench(folder)
    bench.episode(*ALONE, *HELPED, "begin", "3")
    while bench.recording.num_episodes < 2:
        pass
    del bench  # No close: as if the process had died.
    again = record(folder, FAILED)
    assert again.recording.num_episodes == 3
    assert finish(folder) == {"episodes": 3, "frames": 3 + 5 + 2}
    with pytest.raises(RecordingError, match="no unfinished"):
        finish(folder)
    with pytest.raises(RecordingError, match="exists already"):
        Recording(folder, 10, "toy")


def test_a_folder_that_cannot_be_written_is_told_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordingError, match=r"file/set: nothing can be recorded there .*give --record a folder"):
        Recording(tmp_path / "file" / "set", 10, "toy")


def test_a_disk_that_was_full_for_the_first_episode_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from real_robot.operator import recorder as module

    write, tries = module.write_text_atomic, list[Path]()

    def full_at_first(path: Path, text: str) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    bench = Bench(tmp_path / "set")
    monkeypatch.setattr(module, "write_text_atomic", full_at_first)
    bench.episode(*FAILED, *ALONE, *ALONE)
    bench.recorder.close()
    assert bench.recording.close() == {"episodes": 2, "frames": 6}
    assert len(bench.problems) == 1 and "No space left" in bench.problems[0]


def test_an_episode_is_cut_where_the_writer_cannot_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from real_robot.operator import recorder as module

    gate, encode = threading.Event(), module.encode_png
    monkeypatch.setattr(module, "encode_png", lambda image: gate.wait(10) and encode(image))
    bench = Bench(tmp_path / "set", capacity=2)
    bench.it.begin("ann")
    for _ in range(8):  # The writer holds one, two wait: the others are lost, and no tick waits for them.
        bench.tick()
    gate.set()
    bench.episode("success", "1")
    bench.recorder.close()
    (rows, _, _), *_ = read_shards(bench.recording.staging)
    assert rows[0]["length"] <= 3 and not rows[0]["success"]
    assert len(bench.problems) == 1 and "cut after" in bench.problems[0]


def test_a_longest_episode(tmp_path: Path) -> None:
    bench = record(tmp_path / "set", ("begin", "9", "success", "1"), max_frames=4)
    (rows, _, _), *_ = read_shards(bench.recording.staging)
    assert rows[0]["length"] == 4 and not rows[0]["success"] and len(bench.problems) == 1


def test_an_episode_that_nobody_labels_counts_as_failed(tmp_path: Path) -> None:
    unlabeled = ("begin", "2", "take_over", "1", "recovery_done", "1", "correction_done", "2")
    bench = record(tmp_path / "set", unlabeled, ALONE)
    rows = [row for shard in read_shards(bench.recording.staging) for row in shard[0]]
    assert [(r["length"], r["success"], r["interventions"]) for r in rows] == [(4, False, 1), (3, True, 0)]


def test_a_label_belongs_to_its_episode_where_the_next_one_begins_before_a_tick(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "set")
    bench.episode("begin", "2", "take_over", "1", "success", "begin", "3", "failure", "1")
    bench.recorder.close()
    rows = [row for shard in read_shards(bench.recording.staging) for row in shard[0]]
    assert [(r["length"], r["success"], r["interventions"]) for r in rows] == [(3, True, 1), (3, False, 0)]


def test_an_unlabeled_episode_keeps_its_counts_while_the_next_ones_scene_is_laid_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "set")
    poll, due = bench.it.poll, list[bool]()

    def after_the_scene(observation: RobotObservation) -> OperatorCommand:  # As `SceneReset` does.
        told = poll(observation)
        due.extend([True] * told.begin)
        if bench.now < 8:
            return OperatorCommand(active=bench.now < 4 and told.active, begin=bench.now == 0, command=told.command)
        return replace(told, begin=bool(due) and not due.clear())

    bench.it.poll = after_the_scene  # type: ignore[method-assign]
    bench.episode("begin", "2", "take_over", "1", "recovery_done", "1", "correction_done", "1", "begin", "5")
    bench.episode("success", "1")
    bench.recorder.close()
    rows = [row for shard in read_shards(bench.recording.staging) for row in shard[0]]
    counts = [(r["length"], r["success"], r["interventions"], r["recoveries"]) for r in rows]
    assert counts == [(4, False, 1, 1), (2, True, 0, 0)]


def test_the_last_observation_is_from_after_the_last_action_where_the_label_comes_within_a_tick(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "set")
    bench.episode("begin", "3")
    poll = bench.it.poll

    def labeled_after(observation: RobotObservation) -> OperatorCommand:
        told = poll(observation)
        bench.it.success("ann")
        return told

    bench.it.poll = labeled_after  # type: ignore[method-assign]
    bench.tick()  # Its command is sent all the same.
    bench.it.poll = poll  # type: ignore[method-assign]
    bench.tick()
    bench.recorder.close()
    [row] = [row for shard in read_shards(bench.recording.staging) for row in shard[0]]
    assert (row["length"], row["success"], row["final_state"][0]) == (4, True, 4)


def test_an_episode_that_does_not_fit_is_refused_and_the_rest_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "set")
    bench.episode(*ALONE)
    bench.it.begin("ann")
    bench.tick(size=16)
    bench.it.success("ann")
    bench.tick(size=16)
    bench.episode(*FAILED)
    bench.recorder.close()
    assert bench.recording.num_episodes == 2
    assert len(bench.problems) == 1 and "other cameras, image sizes" in bench.problems[0]


def test_a_recording_of_another_robot_is_not_continued(tmp_path: Path) -> None:
    record(tmp_path / "set", ALONE)
    with pytest.raises(RecordingError, match="toy at 10 Hz"):
        Recording(tmp_path / "set", 20, "toy")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_simulated_episode_that_the_end_of_the_run_cuts_off_is_not_kept(tmp_path: Path, is_over: bool) -> None:
    """`--results` says of it that it was not run; as a failed one it would teach a failure detector."""
    transport: Any = SimpleNamespace(advertise=lambda *_: lambda message: None, subscribe=lambda *_: None)
    robot: Any = SimpleNamespace(monotonic=lambda stamp: 0.0, flush=lambda before: None, unheard=lambda: [])
    episodes = SimEpisodes(transport, robot, [EpisodeSpec("push", "train", 0)])
    recorder = Recorder(Recording(tmp_path / "set", 10, "toy"), episodes)
    observe = episodes.recorded(recorder)

    def tick(done: bool, sees: bool = True) -> None:
        state = {"id": episodes._id, "done": done, "success": False, "step": 3, "stamp": 0}
        episodes._on_state(String(data=json.dumps(state)))
        seen = RobotObservation({"top": np.zeros((8, 8, 3), np.uint8)}, np.zeros(3, np.float32), "push", 0.0)
        told = episodes.poll(seen)
        command = Command(np.zeros(2, np.float32), "policy", 0.0) if told.active else None
        sent = command and SentCommand(command.values, command.values, (), RUNNING, command.values)
        made = Tick(0, 0.0, seen if sees else None, True, command, sent, 0.0, 0.0, told)
        episodes(made)
        observe(made)

    for done in (False, False, False):
        tick(done)
    if is_over:
        tick(True, sees=False)  # The simulator that is done shows nothing more.
    episodes.leave(recorder)
    recorder.close()
    assert recorder.recording.num_episodes == is_over
    assert [result.outcome for result in episodes.all_results()] == (["failed"] if is_over else ["not run"])


def test_how_long_it_takes_to_finish_counts_what_waits_and_every_episode(tmp_path: Path) -> None:
    record(tmp_path / "set", ALONE, ALONE, FAILED).recording._held.close()  # an earlier run that was cut short
    bench = Bench(tmp_path / "set")
    recorder = bench.recorder
    assert recorder.seconds_left() == 0, "nothing is known yet"
    recorder._episodes.note(3.0)
    recorder._episodes.note(5.0)
    assert recorder.seconds_left() == ASSEMBLING * 3 * 4.0


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    with Recording(tmp_path / "set", 10, "toy"):
        pass
    assert not list(tmp_path.iterdir())
