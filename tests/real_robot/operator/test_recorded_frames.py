"""What a recorded frame says: what was sent and what was asked, who acted, by which policy, when; and what is torn."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_recorder import ALONE, FAILED, HELPED, NEEDS, Bench, record
from typer.testing import CliRunner

from real_robot.contract.load import load_contract
from real_robot.operator.recorder import Recorder, Recording, RecordingError, finish, staging_folder
from vla_rl.cli.app import app
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import open_dataset
from vla_rl.data.lerobot_io import dataset_features, read_shards, robot_features, write_shard


def frames_of(folder: Path) -> Any:
    return pq.read_table(str(folder / "data")).to_pandas()


def test_the_action_is_what_was_sent_and_what_was_asked_stands_beside_it(tmp_path: Path) -> None:
    record(tmp_path / "set", HELPED).recording.close()  # The bench sends half of what is asked.
    frames = frames_of(tmp_path / "set")
    action, requested = np.stack(frames["action"]), np.stack(frames["action.requested"])
    np.testing.assert_allclose(requested[:, 0], [0.0, 0.01, 0.05, 0.06, 0.07])
    np.testing.assert_allclose(action, requested / 2)
    assert "executed_action" not in frames


def test_a_wild_request_does_not_spoil_the_statistics(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "set")
    bench.episode("begin", "3")
    bench.tick(action=1e30)
    bench.episode("success", "1")
    bench.recorder.close()
    (rows, _, shard), *_ = read_shards(staging_folder(tmp_path / "set"))
    stats = json.loads(rows[0]["stats"])
    assert stats["action.requested"]["max"] <= stats["action"]["max"]
    episode = stored_episode(requested=[[np.nan, 0.0], [1e30, np.inf], [-1e30, 0.5]])
    write_shard(tmp_path / "torn" / "shard_00000", [episode], [], FEATURES)
    (rows, _, shard), *_ = read_shards(tmp_path / "torn")
    stats = json.loads(rows[0]["stats"])["action.requested"]
    assert all(np.isfinite(v).all() and np.abs(v).max() <= 1.0 for k, v in stats.items() if k != "count")
    raw = np.stack(pq.read_table(str(shard / "frames.parquet")).to_pandas()["action.requested"])
    assert np.isnan(raw[0, 0]) and raw[1, 0] == np.float32(1e30), "the column itself tells all"


def test_time_goes_on_where_nothing_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "set", HELPED).recording.close()
    frames = frames_of(tmp_path / "set")
    np.testing.assert_allclose(frames["time"], [0, 1, 5, 6, 7])  # It was paused for three ticks of a second each.
    np.testing.assert_allclose(frames["timestamp"], np.arange(5) / 10, atol=1e-6)


def test_lerobots_intervention_flag_says_where_a_person_corrected(tmp_path: Path) -> None:
    record(tmp_path / "set", HELPED, ALONE).recording.close()
    frames = frames_of(tmp_path / "set")
    driven = frames["control_source"].isin(["recovery", "correction"])
    assert list(frames["intervention"]) == list(driven) == [False, False, True, True, True, False, False, False]


def test_each_frame_names_the_policy_in_force(tmp_path: Path) -> None:
    names = iter("aabbb")
    bench = record(tmp_path / "set", ALONE, FAILED, policy_version=lambda: next(names))
    bench.recording.close()
    assert list(frames_of(tmp_path / "set")["policy_version"]) == list("aabbb")


def test_the_numbers_keep_their_names(tmp_path: Path) -> None:
    contract = load_contract("so101")
    bench = Bench(tmp_path / "set")
    bench.recording = Recording(
        tmp_path / "named", 10, "toy", state_names=("x", "y", "z"), action_names=("speed", "gripper")
    )
    bench.recorder = Recorder(bench.recording, bench.it)
    bench.episode(*ALONE)
    bench.recorder.close()
    bench.recording.close()
    features = json.loads((tmp_path / "named" / "meta" / "info.json").read_text())["features"]
    assert features["observation.state"]["names"] == ["x", "y", "z"]
    assert features["action"]["names"] == features["action.requested"]["names"] == ["speed", "gripper"]
    assert contract.action_names[:2] == ("shoulder_pan", "shoulder_lift")
    assert contract.observation.state_names[0] == "shoulder_pan.pos"
    sim = load_contract("sim_robot").observation
    assert sim.state_names[:4] == (*(f"end_effector_pose.{n}" for n in ("x", "y", "z")), "end_effector_pose.rx")
    assert sim.state_names[-2:] == ("finger_left", "finger_right") and len(sim.state_names) == sim.state_dim


def test_lerobot_reads_it_and_its_policy_learns_the_sent_action(tmp_path: Path) -> None:
    from lerobot.configs import FeatureType
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    record(tmp_path / "set", HELPED, ALONE).recording.close()
    dataset: Any = LeRobotDataset("local/set", root=tmp_path / "set")
    assert bool(dataset[2]["intervention"]) and not bool(dataset[0]["intervention"])
    assert float(dataset[2]["time"]) == 5.0
    outputs = [n for n, f in dataset_to_policy_features(dataset.meta.features).items() if f.type is FeatureType.ACTION]
    assert outputs[0] == "action", "the one that LeRobot's policies predict"


def test_what_was_recorded_before_is_read_as_it_was(tmp_path: Path) -> None:
    """Datasets of `vla-rl collect`: `action` to learn from, `executed_action` beside it."""
    record(tmp_path / "new", HELPED, ALONE).recording.close()
    new = open_dataset(DatasetConfig(path=str(tmp_path / "new"), frames="rac"), NEEDS)
    staging = staging_folder(tmp_path / "old")
    bench = record(tmp_path / "old", HELPED, ALONE)
    shards = [bench.recording.staging / f"shard_{i:05d}" for i in range(2)]
    old_features = dataset_features(("top",), (8, 8), 3, 2)
    for shard in shards:
        frames = pq.read_table(str(shard / "frames.parquet")).to_pydict()
        requested = np.asarray(frames["action.requested"], np.float32)
        sent = np.asarray(frames["action"], np.float32)
        count = len(sent)
        episode = replace(
            stored_episode([[0.0, 0.0]] * count),
            png={"top": [f["bytes"] for f in frames["observation.images.top"]]},
            state=np.asarray(frames["observation.state"], np.float32),
            actions=requested,
            executed_actions=sent,
            control_source=frames["control_source"],
            final_png={"top": frames["observation.images.top"][-1]["bytes"]},
            final_state=np.zeros(3, np.float32),
        )
        shutil.rmtree(shard)
        write_shard(shard, [episode], [], old_features)
    settings = json.loads((staging / "settings.json").read_text())
    (staging / "settings.json").write_text(json.dumps({**settings, "features": old_features}))
    finish(tmp_path / "old")
    old = open_dataset(DatasetConfig(path=str(tmp_path / "old"), frames="rac"), NEEDS)
    np.testing.assert_array_equal(old.rows, new.rows)
    np.testing.assert_allclose(old.actions, 2 * new.actions)
    np.testing.assert_allclose(old.executed_actions, new.actions)


@pytest.mark.parametrize("file", ["frames.parquet", "episodes.parquet", "rejected.json"])
def test_a_torn_recording_gets_a_message_and_the_rest_can_be_saved(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "set"
    bench = record(folder, ALONE, FAILED)
    torn = bench.recording.staging / "shard_00001"
    (torn / file).write_bytes((torn / file).read_bytes()[:-1][:200] if file != "rejected.json" else b"[[")
    with pytest.raises(DatasetError, match=r"shard_00001.*damaged.*move the folder away"):
        finish(folder)
    assert not folder.exists()
    said = CliRunner().invoke(app, ["import", str(folder)])
    assert said.exit_code == 2 and "shard_00001" in said.output and "Traceback" not in said.output
    torn.rename(tmp_path / "torn")
    assert finish(folder) == {"episodes": 1, "frames": 3}


def test_torn_settings_get_a_message(tmp_path: Path) -> None:
    bench = record(tmp_path / "set", ALONE)
    (bench.recording.staging / "settings.json").write_text('{"rate": 10, ')
    for act in (lambda: finish(tmp_path / "set"), lambda: Recording(tmp_path / "set", 10, "toy")):
        with pytest.raises(RecordingError, match=r"settings\.json: damaged"):
            act()


def test_a_torn_dataset_gets_a_message_whichever_file_it_is(tmp_path: Path) -> None:
    whole = tmp_path / "set"
    record(whole, ALONE, FAILED).recording.close()
    files = [f.relative_to(whole) for f in whole.rglob("*") if f.is_file()]
    assert len(files) >= 5
    for number, file in enumerate(files):
        torn = tmp_path / f"torn_{number}"
        shutil.copytree(whole, torn)
        data = (torn / file).read_bytes()
        (torn / file).write_bytes(data[: len(data) // 2])
        try:
            open_dataset(DatasetConfig(path=str(torn)), NEEDS)
        except DatasetError as error:
            assert str(torn) in str(error) and "again" in str(error), file
        else:
            assert file.name in ("stats.json", "README.md"), f"{file} is torn and nobody noticed"


FEATURES = robot_features(dataset_features((), (0, 0), 1, 2))


def stored_episode(requested: list[list[float]]) -> Any:
    from vla_rl.data.lerobot_io import RecordedEpisode

    count = len(requested)
    return RecordedEpisode(
        task="push",
        split="train",
        index=0,
        instruction="push",
        png={},
        state=np.zeros((count, 1), np.float32),
        actions=np.linspace(-1, 1, 2 * count, dtype=np.float32).reshape(count, 2),
        executed_actions=np.zeros((count, 2), np.float32),
        reward=np.eye(1, count, count - 1, dtype=np.float32)[0],
        success=True,
        control_source=["policy"] * count,
        policy_version="v",
        final_png={},
        final_state=np.zeros(1, np.float32),
        requested_actions=np.asarray(requested, np.float32),
        time=np.arange(count, dtype=np.float64),
    )
