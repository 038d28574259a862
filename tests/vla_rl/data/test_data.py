"""Datasets: ours read by LeRobot, LeRobot's read by us, what batches hold, and what is said of bad ones."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.dummy import DummyConfig
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import BCDataset, DataNeeds, hindsight_keyframes, latched_success, open_dataset
from vla_rl.data.lerobot_io import decode_image
from vla_rl.data.source import LeRobotSource, resize
from vla_rl.data.statistics import compute_statistics
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

NEEDS = DataNeeds(cameras=("agentview",), action_dim=7, state_dim=8, fps=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Ten episodes, some failed, of two tasks."""
    path = tmp_path_factory.mktemp("data") / "demos"
    env = DummyConfig(num_envs=3, image_size=32, cameras=("agentview", "wrist"), horizon=6)
    collect_dataset(env, CollectConfig(dataset=str(path), episodes_per_task=5, noise=0.5, keep="all"), seed=3)
    return path


@pytest.fixture
def demos(shared, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(shared, tmp_path / "demos", ignore=shutil.ignore_patterns(".cache")))


@pytest.fixture
def no_home_cache(tmp_path, monkeypatch):
    """Keeps `datasets` from writing into the home folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def read(path: Path, needs: DataNeeds = NEEDS, **options):
    return open_dataset(DatasetConfig.model_validate({"path": str(path), **options}), needs)


def edit_frames(dataset: Path, change) -> None:
    """Rewrite the data file with `change(table)`."""
    file = dataset / "data" / "chunk-000" / "file-000.parquet"
    pq.write_table(change(pq.read_table(str(file))), str(file))


def replace_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def test_lerobot_reads_ours(shared, no_home_cache):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    theirs = LeRobotDataset("local/test", root=shared)
    ours = read(shared)
    assert theirs.meta.total_episodes == 10 and theirs.meta.fps == 10 and len(theirs) == len(ours.actions)
    for i in (0, 7, len(theirs) - 1):
        item = theirs[i]
        image = (item["observation.images.agentview"].permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)
        assert np.array_equal(image, ours.images["agentview"][i])
        assert np.array_equal(item["action"].numpy(), ours.actions[i])
        assert np.array_equal(item["observation.state"].numpy(), ours.state[i])
        assert item["task"] == ours.instructions[ours.task[i]]
        assert item["control_source"] == "expert" and item["policy_version"] == "expert"
    stats = theirs.meta.stats
    assert np.allclose(stats["action"]["mean"], ours.actions.mean(0), atol=1e-5)
    assert np.allclose(stats["action"]["max"], ours.actions.max(0))
    assert stats["observation.images.agentview"]["mean"].shape == (3, 1, 1)


def make_with_lerobot(path: Path, use_videos: bool, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Two episodes of 5 frames by LeRobot's own recorder, no success, no control source. Returns images, actions."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    image = {
        "dtype": "video" if use_videos else "image",
        "shape": (size, size, 3),
        "names": ["height", "width", "channels"],
    }
    features = {
        "observation.images.top": image,
        "observation.state": {"dtype": "float32", "shape": (8,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": None},
    }
    dataset = LeRobotDataset.create("local/theirs", 10, features, root=path, use_videos=use_videos)
    rng = np.random.default_rng(0)
    images = np.zeros((10, size, size, 3), np.uint8)
    actions = rng.normal(size=(10, 7)).astype(np.float32)
    for i in range(10):
        images[i] = 20 * i + np.linspace(0, 40, size, dtype=np.uint8)[:, None, None]
        state = np.full(8, i, np.float32)
        dataset.add_frame(
            {"observation.images.top": images[i], "observation.state": state, "action": actions[i], "task": "go"}
        )
        if i % 5 == 4:
            dataset.save_episode()
    dataset.finalize()
    return images, actions


@pytest.mark.parametrize("use_videos", [False, True])
def test_we_read_lerobots(tmp_path, use_videos, no_home_cache):
    images, actions = make_with_lerobot(tmp_path / "theirs", use_videos)
    data = read(tmp_path / "theirs", camera_map={"top": "agentview"})
    assert np.array_equal(data.actions, actions) and np.array_equal(data.executed_actions, actions)
    assert data.state[:, 0].tolist() == list(range(10)) and data.lengths.tolist() == [5, 5]
    difference = np.abs(data.images["agentview"][:].astype(int) - images.astype(int))
    assert difference.max() == 0 if not use_videos else difference.mean() < 3  # Videos are lossy; a frame is 20 apart.
    assert data.instructions == ["go"]


def test_batches_hold_the_actions_that_followed(shared):
    data = BCDataset([read(shared, DataNeeds(("wrist", "agentview"), 7, 8))], chunk_size=4)
    part = data.parts[0]
    table = pq.read_table(str(shared / "data" / "chunk-000" / "file-000.parquet"))
    actions = np.array(table.column("action").to_pylist(), np.float32)
    assert np.array_equal(part.actions, actions)
    last = int(part.starts[0] + part.lengths[0] - 1)
    batch = part.batch(np.array([last - 1, 0]), 4)
    assert batch.valid.tolist() == [[True, True, False, False], [True] * 4]
    assert np.array_equal(batch.actions[1], actions[:4])
    assert np.array_equal(batch.actions[0], actions[[last - 1, last, last, last]])
    stored = table.column("observation.images.wrist")[last - 1].as_py()["bytes"]
    assert np.array_equal(batch.obs.images["wrist"][0], decode_image(stored))
    assert batch.obs.images["wrist"].dtype == np.uint8 and list(batch.obs.images) == ["wrist", "agentview"]
    assert batch.obs.instruction[1] == part.instructions[part.task[0]]
    assert batch.keyframe is not None and batch.keyframe.shape == (2, 3)
    second = batch.select(np.array([1]))
    assert second.keyframe is not None and np.array_equal(second.keyframe, batch.keyframe[1:], equal_nan=True)
    assert replace(batch, keyframe=None).select(np.array([1])).keyframe is None


def test_the_observation_after_the_last_action(shared):
    data = read(shared, DataNeeds(("wrist", "agentview"), 7, 8, image_size=16))
    rows = pq.read_table(str(next((shared / "meta" / "episodes").rglob("*.parquet")))).to_pylist()
    assert data.final_images is not None and data.final_state is not None
    assert list(data.final_images) == ["wrist", "agentview"] and data.final_images["wrist"].shape == (10, 16, 16, 3)
    for camera in ("wrist", "agentview"):
        last = decode_image(rows[3][f"final_image_{camera}"])
        assert np.array_equal(data.final_images[camera][3], resize(last, 16))
    assert np.allclose(data.final_state, [row["final_state"] for row in rows])
    assert data.initial_states[3] == f"{rows[3]['env_task']}/train/{rows[3]['env_index']}"


def test_datasets_that_do_not_record_what_came_last(demos, tmp_path, no_home_cache):
    make_with_lerobot(tmp_path / "theirs", use_videos=False)
    theirs = read(tmp_path / "theirs", camera_map={"top": "agentview"})
    assert theirs.final_images is None and theirs.final_state is None
    assert theirs.initial_states == ["theirs/0", "theirs/1"]
    file = next((demos / "meta" / "episodes").rglob("*.parquet"))
    table = pq.read_table(str(file))
    images = table.column("final_image_agentview").to_pylist()
    pq.write_table(replace_column(table, "final_image_agentview", pa.array([None, *images[1:]])), str(file))
    some = read(demos)
    assert some.final_images is None and some.final_state is not None


def test_what_a_step_draws_depends_on_seed_and_step_alone(shared):
    data = BCDataset([read(shared)], 4)
    one, same = data.batch(8, seed=1, step=5), BCDataset([read(shared)], 4).batch(8, seed=1, step=5)
    assert np.array_equal(one.actions, same.actions) and np.array_equal(one.obs.state, same.obs.state)
    assert not np.array_equal(one.obs.state, data.batch(8, seed=1, step=6).obs.state)
    assert not np.array_equal(one.obs.state, data.batch(8, seed=2, step=5).obs.state)


def test_hindsight_keyframes_by_hand():
    closing = np.array([0, 0, 1, 1, 0, 0, 0, 1], bool)  # Episodes: frames 0-5 and 6-7.
    state = np.arange(8, dtype=np.float32)[:, None].repeat(3, 1)
    ends = np.array([6] * 6 + [8] * 2)
    # Closes at 2, opens at 4, ends at 5; the second closes at 7, its last frame.
    every = np.ones(8, bool)
    keyframes = hindsight_keyframes(state, closing, ends, every)
    assert keyframes is not None and keyframes[:, 0].tolist() == [2, 2, 4, 4, 5, 5, 7, 7]
    assert hindsight_keyframes(state[:, :2], closing, ends, every) is None
    # Recorded every second step only: the states of frames 5 and 7 are older ones.
    seldom = hindsight_keyframes(state, closing, ends, np.arange(8) % 2 == 0)
    assert seldom is not None and seldom.dtype == np.float32
    assert np.array_equal(seldom[:, 0], [2, 2, 4, 4, np.nan, np.nan, np.nan, np.nan], equal_nan=True)


def test_success_is_latched_by_hand():
    # Three episodes: solved at its second step and undone; solved at its end; said to have failed.
    recorded = np.array([0, 1, 0, 0, 0, 0, 1, 0, 1, 0], bool)
    latched = latched_success(recorded, np.array([0, 4, 7]), np.array([True, True, False]))
    assert latched.astype(int).tolist() == [0, 1, 1, 1, 0, 0, 1, 0, 0, 0]
    unrecorded = latched_success(np.zeros(4, bool), np.array([0, 2]), np.array([True, False]))
    assert unrecorded.tolist() == [False, True, False, False]


def test_steps_record_success(shared):
    data = read(shared)
    last = data.starts + data.lengths - 1
    assert data.succeeded[last].tolist() == data.success.tolist() and data.succeeded.sum() == data.success.sum()


def test_filters(shared):
    everything = read(shared)
    assert 0 < everything.success.sum() < 10
    good = read(shared, only_successes=True)
    assert good.num_episodes == everything.success.sum()
    assert everything.success[np.searchsorted(good.starts, good.rows, side="right") - 1].all()
    two = read(shared, episodes_per_task=2)
    assert two.num_episodes == 4 and len(two.rows) < len(everything.rows)
    assert np.array_equal(two.rows, read(shared, episodes_per_task=2).rows)


def test_frames_mask_later_actions_too(demos):
    length = int(read(demos).lengths[0])

    def half_corrected(table: pa.Table) -> pa.Table:
        sources = ["expert"] * table.num_rows
        sources[1:3] = ["policy"] * 2
        return replace_column(table, "control_source", pa.array(sources))

    assert length >= 4
    edit_frames(demos, half_corrected)
    data = read(demos, frames="hg_dagger")
    assert data.rows[:2].tolist() == [0, 3]
    assert data.batch(np.array([0]), 4).valid.tolist() == [[True, False, False, True]]
    edit_frames(demos, lambda t: replace_column(t, "control_source", pa.array(["policy"] * t.num_rows)))
    with pytest.raises(DatasetError, match=r"no frame is left after frames=hg_dagger.*\['policy'\]"):
        read(demos, frames="hg_dagger")
    edit_frames(demos, lambda t: replace_column(t, "control_source", pa.array(["ghost"] * t.num_rows)))
    with pytest.raises(DatasetError, match=r"control_source holds \['ghost'\]; allowed: policy, expert"):
        read(demos)


def test_several_datasets_mix_by_weight(shared, demos):
    def shift(table: pa.Table) -> pa.Table:
        flat = pa.array(np.full(table.num_rows * 7, 5.0, np.float32))
        return replace_column(table, "action", pa.FixedSizeListArray.from_arrays(flat, 7))

    edit_frames(demos, shift)
    data = BCDataset([read(shared, weight=1.0), read(demos, weight=3.0)], 2)
    batch = data.batch(400, seed=0, step=0)
    share = (batch.actions[:, 0, 0] == 5).mean()
    assert 0.65 < share < 0.85 and batch.size == 400
    first_half = (batch.actions[:200, 0, 0] == 5).mean()
    assert abs(first_half - share) < 0.15  # Shuffled, not one after the other.
    assert data.num_episodes == 20


def test_hold_out_splits_whole_episodes(shared):
    data = BCDataset([read(shared)], 4)
    train, held = data.hold_out(0.2, seed=0)
    assert (train.num_episodes, held.num_episodes) == (8, 2)
    assert not set(train.parts[0].rows) & set(held.parts[0].rows)
    assert train.num_frames + held.num_frames == data.num_frames


def test_hold_out_parts_no_episodes_of_one_initial_state(shared):
    """Else what is fitted on an episode's state would judge it."""
    data = read(shared)
    whole = {tuple(part.episodes.tolist()) for part in data.hold_out(0.2, [0, 0])}
    order = np.random.default_rng([0, 0]).permutation(10)
    assert whole == {tuple(sorted(order[2:].tolist())), tuple(sorted(order[:2].tolist()))}
    for size, share, num_held in ((2, 0.2, 2), (2, 0.3, 4), (5, 0.1, 5), (5, 0.9, 5), (10, 0.3, 3)):
        grouped = replace(data, initial_states=[f"s{episode // size}" for episode in range(10)])
        for seed in range(5):
            train, held = grouped.hold_out(share, [seed])
            states = [{grouped.initial_states[e] for e in part.episodes} for part in (train, held)]
            assert size == 10 or states[0].isdisjoint(states[1])
            assert held.num_episodes == num_held and train.num_episodes == 10 - num_held
    uneven = replace(data, initial_states=["many"] * 8 + ["few"] * 2)
    assert {uneven.hold_out(0.2, [seed])[1].num_episodes for seed in range(5)} == {2}


def test_statistics_by_hand(shared):
    part = read(shared, only_successes=True)
    stats = compute_statistics([part])
    actions = part.actions[part.rows]
    assert stats["action"]["mask"] == [True] * 6 + [False]
    assert np.allclose(stats["action"]["q01"], np.quantile(actions, 0.01, axis=0))
    assert np.allclose(stats["proprio"]["max"], part.state[part.rows].max(0))
    assert stats["num_transitions"] == len(actions) and stats["num_trajectories"] == part.num_episodes
    assert json.loads(json.dumps(stats)) == stats


def test_images_are_resized_and_the_cache_is_keyed_by_size_and_content(demos):
    read(demos)
    small = read(demos, DataNeeds(("agentview",), 7, image_size=16))
    assert small.images["agentview"].shape[1:] == (16, 16, 3)
    assert len(list((demos / ".cache").iterdir())) == 2
    before = read(demos).actions.copy()
    edit_frames(demos, lambda t: replace_column(t, "next.reward", pa.array(np.ones(t.num_rows, np.float32))))
    assert np.array_equal(read(demos).actions, before)
    assert len(list((demos / ".cache").iterdir())) == 3


def test_the_cache_is_decoded_once(demos, monkeypatch):
    read(demos)
    monkeypatch.setattr(LeRobotSource, "images", None)
    read(demos)


# --- bad input ---------------------------------------------------------------------------------


def test_missing_dataset(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset not found: .*nowhere .*vla-rl collect"):
        read(tmp_path / "nowhere")


def test_truncated_data_file(demos):
    file = demos / "data" / "chunk-000" / "file-000.parquet"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(DatasetError, match=r"file-000.parquet: missing or damaged \(Arrow.*again"):
        read(demos)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet"])
def test_damaged_metadata(demos, name):
    (demos / name).write_bytes((demos / name).read_bytes()[:40])
    with pytest.raises(DatasetError, match=r"missing or damaged"):
        read(demos)


def test_missing_data_file(demos):
    shutil.rmtree(demos / "data")
    with pytest.raises(DatasetError, match=r"data has no parquet file"):
        read(demos)


def test_fewer_frames_than_listed(demos):
    edit_frames(demos, lambda t: t.slice(0, t.num_rows - 3))
    with pytest.raises(DatasetError, match=r"incomplete"):
        read(demos)


def test_broken_image(demos):
    def break_one(table: pa.Table) -> pa.Table:
        images = table.column("observation.images.agentview").to_pylist()
        images[3]["bytes"] = b"not an image"
        return replace_column(table, "observation.images.agentview", pa.array(images))

    edit_frames(demos, break_one)
    with pytest.raises(DatasetError, match=r"observation.images.agentview cannot be decoded: 12 bytes"):
        read(demos)
    assert not (demos / ".cache").exists() or not any((demos / ".cache").iterdir())


def test_damaged_final_observation(demos):
    file = next((demos / "meta" / "episodes").rglob("*.parquet"))
    table = pq.read_table(str(file))
    broken = replace_column(table, "final_image_agentview", pa.array([b"not an image"] * table.num_rows))
    pq.write_table(broken, str(file))
    with pytest.raises(DatasetError, match=r"final_image_agentview cannot be decoded: 12 bytes"):
        read(demos)
    states = np.array(table.column("final_state").to_pylist(), np.float32)
    states[2, 0] = np.nan
    pq.write_table(replace_column(table, "final_state", pa.array(states.tolist())), str(file))
    with pytest.raises(DatasetError, match=r"final_state holds NaN or infinite values in 1 episodes.*episode 2"):
        read(demos)
    short = pa.array(states[:, :5].tolist())
    pq.write_table(replace_column(table, "final_state", short), str(file))
    with pytest.raises(DatasetError, match=r"final_state has 5 numbers, observation.state has 8"):
        read(demos)


@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_nan(demos, name):
    def poison(table: pa.Table) -> pa.Table:
        values = np.array(table.column(name).to_pylist(), np.float32)
        values[4, 1] = np.nan
        flat = pa.array(values.reshape(-1))
        return replace_column(table, name, pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))

    edit_frames(demos, poison)
    with pytest.raises(
        DatasetError, match=rf"{name} holds NaN or infinite values in 1 frames, first in episode 0, frame 4"
    ):
        read(demos)


def test_other_version(demos):
    info = json.loads((demos / "meta" / "info.json").read_text())
    (demos / "meta" / "info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(DatasetError, match=r"is LeRobotDataset v2.1; v3.0 is needed. Convert"):
        read(demos)


def test_other_cameras(shared):
    with pytest.raises(DatasetError, match=r"has cameras \['agentview', 'wrist'\].*missing \['front'\].*camera_map"):
        read(shared, DataNeeds(("front",), 7))
    mapped = read(shared, DataNeeds(("front",), 7), camera_map={"wrist": "front"})
    assert np.array_equal(mapped.images["front"], read(shared, DataNeeds(("wrist",), 7)).images["wrist"])
    with pytest.raises(DatasetError, match=r"camera_map names \['side'\]"):
        read(shared, camera_map={"side": "agentview"})


def test_other_sizes_and_rates(shared):
    with pytest.raises(DatasetError, match=r"actions have 7 dimensions, the policy's have 14"):
        read(shared, DataNeeds(("agentview",), 14))
    with pytest.raises(DatasetError, match=r"8 dimensions in observation.state, the policy reads 9.*use_state=false"):
        read(shared, DataNeeds(("agentview",), 7, 9))
    with pytest.raises(DatasetError, match=r"recorded at 10 fps, the environment is controlled at 20 Hz"):
        read(shared, DataNeeds(("agentview",), 7, fps=20))


def test_too_few_episodes(shared, demos):
    with pytest.raises(
        DatasetError, match=r"5 usable episodes of 'move to the \w+ square', episodes_per_task asks for 9"
    ):
        read(shared, episodes_per_task=9)
    for file in (demos / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(str(file))
        pq.write_table(replace_column(table, "success", pa.array([False] * table.num_rows)), str(file))
    with pytest.raises(DatasetError, match=r"none of its 10 episodes succeeded"):
        read(demos, only_successes=True)


def test_success_not_recorded(tmp_path, no_home_cache):
    make_with_lerobot(tmp_path / "theirs", use_videos=False)
    with pytest.raises(DatasetError, match=r"does not record which episodes succeeded"):
        read(tmp_path / "theirs", camera_map={"top": "agentview"}, only_successes=True)


def test_datasets_that_do_not_mix(shared, tmp_path, no_home_cache):
    make_with_lerobot(tmp_path / "theirs", use_videos=False, size=16)
    parts = [read(shared), read(tmp_path / "theirs", camera_map={"top": "agentview"})]
    with pytest.raises(DatasetError, match=r"differ in image size.*sft.image_size"):
        BCDataset(parts, 4)


def test_disk_full_while_decoding(demos, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=r"disk full while writing the dataset cache .*MiB free") as caught:
        read(demos)
    assert caught.value.errno == errno.ENOSPC
    assert not any((demos / ".cache").iterdir())
    monkeypatch.undo()
    assert read(demos).num_episodes == 10
