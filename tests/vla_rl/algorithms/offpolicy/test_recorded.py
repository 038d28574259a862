"""Episodes as a recorder writes them become decisions, once each: who drove, what a takeover means, where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from recorded_episodes import episode
from tiny_run import save_policy

from real_robot.operator.recorder import Recording, staging_folder
from vla_rl.algorithms.offpolicy import recorded
from vla_rl.algorithms.offpolicy.recorded import new_episodes, num_recorded, recorded_transitions, recordings_in
from vla_rl.algorithms.offpolicy.replay import Replay
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import RECORDING_SETTINGS, SHARD_EPISODES, SHARD_FRAMES, list_shards
from vla_rl.policies.load import load_policy

CAMERAS = ("agentview",)


HELPED = ["policy"] * 5 + ["recovery"] * 2 + ["correction"] * 3
EPISODES = [(HELPED, True), (["policy"] * 6, False), (["policy"] * 3, True)]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    made = Recording(tmp_path / "set", 10, "dummy")
    for index, (sources, success) in enumerate(EPISODES):
        made.add(episode(index, sources, success), {"agentview": (32, 32)})
    return made


def test_an_episode_keeps_its_place_when_its_recording_is_finished(recording: Recording) -> None:
    under_way = new_episodes(recording.folder, 1, CAMERAS, 10)
    assert [one.initial_state for one in new_episodes(recording.folder, 0, CAMERAS, 2)] == [
        "reach_red/train/0",
        "reach_red/train/1",
    ]
    assert new_episodes(recording.folder, 3, CAMERAS, 10) == []
    recording.close()
    assert recording.folder.is_dir() and not staging_folder(recording.folder).exists()
    finished = new_episodes(recording.folder, 1, CAMERAS, 10)
    assert [one.initial_state for one in finished] == ["reach_red/train/1", "reach_red/train/2"]
    for one, other in zip(under_way, finished, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.obs.images["agentview"], other.obs.images["agentview"])
        assert (one.success, list(one.source), one.policies) == (other.success, list(other.source), ("one",))
    assert new_episodes(recording.folder, 3, CAMERAS, 10) == []


def test_a_damaged_episode_is_named(recording: Recording) -> None:
    file = staging_folder(recording.folder) / "shard_00001" / SHARD_FRAMES
    file.write_bytes(file.read_bytes()[:200])
    assert len(new_episodes(recording.folder, 0, CAMERAS, 1)) == 1
    with pytest.raises(DatasetError, match=r"shard_00001: this part of a recording is damaged.*move the folder away"):
        new_episodes(recording.folder, 1, CAMERAS, 1)
    with pytest.raises(DatasetError, match="has no camera 'wrist', which the policy reads"):
        new_episodes(recording.folder, 0, ("wrist",), 1)


def test_what_is_being_written_is_no_recording(recording: Recording) -> None:
    """`finish` fills a folder beside the recording before it gets its name; a killed one leaves it there."""
    other = Recording(recording.folder.with_name("later"), 10, "dummy")
    other.add(episode(7, HELPED, True), {"agentview": (32, 32)})
    folder = recording.folder.parent
    assert recordings_in(folder) == [other.folder, recording.folder]
    other.close()
    shutil.copytree(other.folder, folder / ".set.partial-robot-17")
    shutil.copytree(other.folder, folder / ".set.partial-robot-17-old")
    assert recordings_in(folder) == [other.folder, recording.folder]
    assert [num_recorded(one) for one in recordings_in(folder)] == [1, 3]


@pytest.mark.parametrize("half", [False, True], ids=["a whole shard is gone", "half of one is"])
def test_a_recording_that_is_finished_while_it_is_read_keeps_its_places(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    """`finish` deletes the shards one after the other, once the dataset is there."""
    listed, copy = list_shards, recording.folder.with_name("copy")

    def finished_meanwhile(folder: Path) -> list[Path]:
        monkeypatch.setattr(recorded, "list_shards", listed)
        shutil.copytree(folder, copy)
        recording.close()
        copy.rename(folder)
        if half:
            found = listed(folder)
            (folder / "shard_00001" / SHARD_EPISODES).unlink()
            return found
        shutil.rmtree(folder / "shard_00000")
        return listed(folder)

    monkeypatch.setattr(recorded, "list_shards", finished_meanwhile)
    found = new_episodes(recording.folder, 1, CAMERAS, 10)
    assert [one.initial_state for one in found] == ["reach_red/train/1", "reach_red/train/2"]
    assert num_recorded(recording.folder) == 3


def test_minutes_are_of_the_recordings_own_rate(recording: Recording) -> None:
    assert {one.rate for one in new_episodes(recording.folder, 0, CAMERAS, 10)} == {10}
    settings = staging_folder(recording.folder) / RECORDING_SETTINGS
    told = settings.read_text()
    settings.write_text("{}")
    with pytest.raises(DatasetError, match=r"settings\.json: does not say the rate .* move the folder away"):
        new_episodes(recording.folder, 0, CAMERAS, 1)
    settings.write_text(told)
    recording.close()
    assert {one.rate for one in new_episodes(recording.folder, 0, CAMERAS, 10)} == {10}


def test_a_takeover_continues_the_episode(recording: Recording, tmp_path: Path) -> None:
    policy = load_policy(save_policy(tmp_path / "base"))  # Chunks of 4.
    found = new_episodes(recording.folder, 0, CAMERAS, 10)
    whole = recorded_transitions(policy, found)
    assert whole.success.tolist() == [True, False, True] and len(whole) == 19
    assert whole.person is not None and whole.person[:10].tolist() == [False] * 5 + [True] * 5
    assert whole.chunk[3, :, 0].tolist() == [3, 4, 5, 6], "what was executed, whoever drove"
    assert whole.following[3] == 7 and whole.num_steps[8] == 2 and whole.following[8] == -1
    assert whole.chunk[9, :, 0].tolist() == [9] * 4 and whole.remaining[:2].tolist() == [10, 9]
    assert whole.embedding.shape[0] == 19 and np.ptp(whole.embedding[:10], 0).max() >= 0

    replay = Replay(tmp_path / "replay", None, 0.5, 100, "p", person_is_prior=True)
    replay.add(0, whole, {"recording": "set", "episodes": 3})
    assert replay.num_prior == 5
    batch = replay.draw(400, 0.9, np.random.default_rng(0))
    assert set(batch.chunk[~batch.fresh][:, 0].tolist()) == {5, 6, 7, 8, 9} and (~batch.fresh).sum() == 200
    assert set(batch.chunk[batch.fresh][:, 0].tolist()) == set(whole.chunk[:, 0, 0].tolist()), "and fresh ones, too"


def test_what_left_the_buffer_is_still_known_to_have_been_taken_up(recording: Recording, tmp_path: Path) -> None:
    policy = load_policy(save_policy(tmp_path / "base"))
    replay = Replay(tmp_path / "replay", None, 0.5, 10, "p")
    for number in range(3):
        fresh = recorded_transitions(policy, new_episodes(recording.folder, number, CAMERAS, 1))
        replay.add(number, fresh, {"recording": "set", "episodes": 1})
    again = Replay(tmp_path / "replay", None, 0.5, 10, "p")
    again.restore()
    assert len(again) == len(replay) == 9 and again.num_episodes == 2
    assert again.notes == replay.notes and sum(note["episodes"] for note in again.notes.values()) == 3
