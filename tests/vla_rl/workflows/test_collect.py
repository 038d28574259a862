"""Collection: what is recorded, what is refused, and that a killed collection goes on without repeats or halves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from sim.dummy import DummyConfig
from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.data.lerobot_io import decode_image, read_shards
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.recording_plan import RecordingPlan
from vla_rl.types import EpisodeSpec
from vla_rl.workflows import record_dataset as collect_module
from vla_rl.workflows.record_dataset import CollectConfig, _differences, collect_dataset, left_out
from world_model.data.episodes import EpisodeFrames

ENV = DummyConfig(num_envs=3, image_size=32, cameras=("agentview", "wrist"))


def read_frames(dataset: Path):
    return pq.read_table(str(dataset / "data" / "chunk-000" / "file-000.parquet"))


def read_episodes(dataset: Path) -> list[dict]:
    return pq.read_table(str(dataset / "meta" / "episodes" / "chunk-000" / "file-000.parquet")).to_pylist()


def column(table, name: str) -> np.ndarray:
    return np.array(table.column(name).to_pylist())


def collected(tmp_path: Path, seed: int = 0, policy=None, **options):
    config = CollectConfig.model_validate({"dataset": str(tmp_path / "demos"), "episodes_per_task": 3, **options})
    return collect_dataset(ENV, config, policy=policy, policy_version="v1" if policy else "", seed=seed), config


def test_groups_start_alike_and_are_counted(tmp_path):
    """A killed collection goes on with what its groups lack; see `RecordingPlan.restore`."""
    plan = RecordingPlan(CollectConfig(source="policy", episodes_per_task=5, group_size=2, start_index=7), ["a", "b"])
    specs = list(itertools.takewhile(lambda spec: spec is not None, plan.specs()))
    assert [(s.task, s.index) for s in specs] == [(task, i) for task in "ab" for i in (7, 7, 8, 8, 9)]
    again = RecordingPlan(plan.config, ["a", "b"])
    again.restore([{"task": "a", "index": i, "success": True} for i in (8, 7, 8)], [])
    assert [s.index for s in itertools.takewhile(lambda s: s is not None and s.task == "a", again.specs())] == [7, 9]
    kept = RecordingPlan(plan.config.model_copy(update={"keep": "successes"}), ["a"])
    tried = []
    for spec in itertools.takewhile(lambda spec: spec is not None, kept.specs()):
        tried.append(spec.index)
        kept.finish(spec, False)
    assert tried == [i for i in range(7, 20) for _ in "ab"][:25]
    with pytest.raises(ValidationError, match=r"collect\.group_size: got 2 with collect\.source=expert"):
        CollectConfig(group_size=2)
    with pytest.raises(ValidationError, match=r"collect\.keyframes: got true with collect\.group_size=2"):
        CollectConfig(source="policy", group_size=2, keyframes=True)


def test_expert_frames_are_the_observations_before_each_action(tmp_path):
    result, _ = collected(tmp_path)
    dataset = tmp_path / "demos"
    assert result["episodes"] == 6 and not list(tmp_path.glob(".demos*"))
    episodes, frames = read_episodes(dataset), read_frames(dataset)
    assert frames.num_rows == result["frames"] == sum(e["length"] for e in episodes)
    assert {(e["env_task"], e["env_index"]) for e in episodes} == {
        (t, i) for t in ENV.env_spec().tasks for i in range(3)
    }
    env = ENV.build(num_envs=1)
    for number, episode in enumerate(episodes):  # Replay: the recorded actions give the recorded observations.
        rows = frames.filter(column(frames, "episode_index") == number)
        obs = env.reset([EpisodeSpec(episode["env_task"], episode["env_split"], episode["env_index"])])
        actions, states = column(rows, "executed_action"), column(rows, "observation.state")
        for t in range(episode["length"]):
            for camera in ENV.cameras:
                stored = decode_image(rows.column(f"observation.images.{camera}")[t].as_py()["bytes"])
                assert np.array_equal(stored, obs.images[camera][0])
            assert np.array_equal(states[t].astype(np.float32), obs.state[0])
            result_ = env.step(actions[t].astype(np.float32)[None, None])
            obs = result_.obs
        assert bool(result_.success[0]) == episode["success"]
        assert np.array_equal(decode_image(episode["final_image_agentview"]), obs.images["agentview"][0])
        assert np.allclose(episode["final_state"], obs.state[0])
        done = column(rows, "next.done")
        assert done[-1] and not done[:-1].any() and column(rows, "next.success")[-1] == episode["success"]
        assert column(rows, "next.reward").sum() == float(episode["success"])
    env.close()
    assert set(column(frames, "control_source")) == {"expert"} and set(column(frames, "policy_version")) == {"expert"}
    assert np.array_equal(column(frames, "index"), np.arange(frames.num_rows))


def test_what_follows_a_success_is_recorded_as_succeeded(tmp_path):
    env = ENV.model_copy(update={"steps_after_success": 3})
    config = CollectConfig(dataset=str(tmp_path / "data"), episodes_per_task=2)
    collect_dataset(env, config)
    frames = read_frames(tmp_path / "data")
    for number in range(2):
        rows = frames.filter(column(frames, "episode_index") == number)
        assert column(rows, "next.success").sum() == 4
        assert np.flatnonzero(column(rows, "next.reward")).tolist() == [rows.num_rows - 4]


def test_noise_changes_what_is_executed_not_the_label_nor_the_gripper(tmp_path):
    collected(tmp_path, noise=0.3, noise_hold=2)
    frames = read_frames(tmp_path / "demos")
    label, executed = column(frames, "action"), column(frames, "executed_action")
    assert np.abs(label - executed)[:, :-1].max() > 0.1 and np.array_equal(label[:, -1], executed[:, -1])
    assert np.abs(executed).max() <= 1.0
    first = column(frames, "episode_index") == 0
    noise = (executed - label)[first][:, 2]  # A dimension that the dummy's expert leaves at 0: no clipping.
    assert np.allclose(noise[0], noise[1]) and not np.allclose(noise[1], noise[2])


def test_the_same_seed_gives_the_same_episodes_whatever_the_number_of_environments(tmp_path):
    def run(folder: str, num_envs: int, seed: int) -> dict[tuple, list]:
        config = CollectConfig(dataset=str(tmp_path / folder), episodes_per_task=4, noise=0.2)
        collect_dataset(ENV.model_copy(update={"num_envs": num_envs}), config, seed=seed)
        frames, episodes = read_frames(tmp_path / folder), read_episodes(tmp_path / folder)
        actions, number = column(frames, "executed_action"), column(frames, "episode_index")
        return {(e["env_task"], e["env_index"]): actions[number == e["episode_index"]].tolist() for e in episodes}

    assert run("a", 3, 0) == run("b", 2, 0)
    assert run("c", 3, 1) != run("a2", 3, 0)


def test_keep_successes_goes_on_to_the_next_initial_states(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.rollout.recording_plan.MAX_TRIES", 20)
    hard = ENV.model_copy(update={"horizon": 3})  # Only nearby targets can be reached in time.
    config = CollectConfig(dataset=str(tmp_path / "d"), episodes_per_task=4, keep="successes")
    result = collect_dataset(hard, config)
    episodes = read_episodes(tmp_path / "d")
    assert result["episodes"] == 8 and all(e["success"] for e in episodes)
    assert sum(result["attempts"].values()) > 8
    assert len({(e["env_task"], e["env_index"]) for e in episodes}) == 8


def test_successes_are_kept_of_an_expert_and_everything_of_a_policy():
    assert CollectConfig().keep == "successes" and CollectConfig(source="policy").keep == "all"
    assert (
        CollectConfig(keep="all").keep == "all" and CollectConfig(source="policy", keep="successes").keep == "successes"
    )


def test_no_success_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.rollout.recording_plan.MAX_TRIES", 2)
    hopeless = ENV.model_copy(update={"horizon": 1})
    config = CollectConfig(dataset=str(tmp_path / "d"), episodes_per_task=2)
    with pytest.raises(ConfigError, match=r"none of 8 episodes of reach_red, reach_blue .*no dataset"):
        collect_dataset(hopeless, config)
    assert not list(tmp_path.iterdir())
    all_kept = config.model_copy(update={"keep": "all"})
    assert collect_dataset(hopeless, all_kept)["episodes"] == 4


class HalfAnExpert(DummyConfig):
    """Offers an expert for one of its two tasks."""

    def without_expert(self) -> dict[str, str]:
        return {"reach_blue": "the expert solves 1 of 5 episodes of reach_blue"}


def test_tasks_without_an_expert_are_left_out_and_named(tmp_path):
    env = HalfAnExpert.model_validate(ENV.model_dump())
    config = CollectConfig(dataset=str(tmp_path / "d"), episodes_per_task=3)
    assert list(left_out(env, config)) == ["reach_blue"]
    assert collect_dataset(env, config)["success_rate"] == {"reach_red": 1.0}
    only = CollectConfig(dataset=str(tmp_path / "none"), tasks=("reach_blue",))
    with pytest.raises(ConfigError, match=r"collect\.source: got 'expert'; the expert solves 1 of 5"):
        collect_dataset(env, only)
    assert not (tmp_path / "none").exists() and not left_out(env, CollectConfig(source="policy"))


def chunked_policy():
    """It draws 4 actions at a time."""
    policy = OpenVLAConfig(chunk_size=4, image_size=32, cameras=("agentview",)).build(ENV.env_spec())
    low = np.full(8, -1.0)
    policy.set_norm_stats({"q01": low[:7], "q99": -low[:7]}, {"q01": low, "q99": -low})
    return policy


def test_policy_rollouts_record_every_control_step(tmp_path):
    policy = chunked_policy()
    result, _ = collected(tmp_path, policy=policy, source="policy", episodes_per_task=2, temperature=1.0)
    frames, episodes = read_frames(tmp_path / "demos"), read_episodes(tmp_path / "demos")
    assert result["frames"] == frames.num_rows > 4 * len(episodes)
    assert set(column(frames, "control_source")) == {"policy"} and set(column(frames, "policy_version")) == {"v1"}
    env = ENV.build(num_envs=1)
    episode = max(episodes, key=lambda e: e["length"])
    rows = frames.filter(column(frames, "episode_index") == episode["episode_index"])
    obs = env.reset([EpisodeSpec(episode["env_task"], "train", episode["env_index"])])
    for t in range(episode["length"]):
        assert np.array_equal(column(rows, "observation.state")[t].astype(np.float32), obs.state[0])
        assert np.array_equal(
            decode_image(rows.column("observation.images.wrist")[t].as_py()["bytes"]), obs.images["wrist"][0]
        )
        obs = env.step(column(rows, "action")[t].astype(np.float32)[None, None]).obs
    env.close()


def test_without_every_frame_the_same_episodes_have_what_the_policy_saw(tmp_path):
    options = {"source": "policy", "episodes_per_task": 2, "temperature": 1.0}
    found = []
    for name, every_frame in (("every", True), ("seldom", False)):
        collected(tmp_path, policy=chunked_policy(), dataset=str(tmp_path / name), every_frame=every_frame, **options)
        found.append(open_dataset(DatasetConfig(path=str(tmp_path / name)), DataNeeds(ENV.cameras, 7)))
    every, seldom = found
    assert np.array_equal(every.actions, seldom.actions) and np.array_equal(every.lengths, seldom.lengths)
    step = np.arange(len(seldom.actions)) - np.repeat(seldom.starts, seldom.lengths)
    assert seldom.observed_every == 4 and np.array_equal(seldom.rows, np.flatnonzero(step % 4 == 0))
    assert every.final_images is not None and seldom.final_images is not None
    for camera in ENV.cameras:
        assert np.array_equal(every.images[camera][seldom.rows], seldom.images[camera][seldom.rows])
        assert np.array_equal(every.final_images[camera], seldom.final_images[camera])
        assert len(seldom.images[camera].distinct) == len(seldom.rows) < len(seldom.images[camera])
    assert np.array_equal(every.state[seldom.rows], seldom.state[seldom.rows])
    assert every.keyframes is not None and seldom.keyframes is not None
    known = np.isfinite(seldom.keyframes).all(1)  # Where the gripper next changes, if a state was recorded there.
    assert np.array_equal(every.keyframes[known], seldom.keyframes[known]) and not known.all()
    spec = ENV.env_spec()
    frames = [EpisodeFrames.of(one, 4, spec.action_low, spec.action_high) for one in found]
    everything = np.arange(frames[0].num_frames)
    assert np.array_equal(frames[0].images(everything), frames[1].images(everything))
    assert np.array_equal(frames[0].success(everything), frames[1].success(everything))
    with pytest.raises(DatasetError, match=r"an image every 4 control steps.*after 2 and then every 4"):
        frames[1].cut_after(2)


class _Stop(RuntimeError):
    pass


def test_a_stopped_collection_goes_on_without_repeats(tmp_path, monkeypatch):
    whole, _ = collected(tmp_path / "whole", noise=0.2, episodes_per_task=5, shard_episodes=2)

    def stop(summary):
        if summary["episodes"] >= 6:
            raise _Stop

    config = CollectConfig(dataset=str(tmp_path / "cut"), noise=0.2, episodes_per_task=5, shard_episodes=2)
    monkeypatch.setattr(collect_module.time, "monotonic", iter(range(10**9)).__next__)
    with pytest.raises(_Stop):
        collect_dataset(ENV, config, on_progress=stop)
    monkeypatch.undo()
    assert not (tmp_path / "cut").exists()
    staged = [row for rows, _, _ in read_shards(tmp_path / ".cut.collecting") for row in rows]
    assert 0 < len(staged) < 10
    result = collect_dataset(ENV.model_copy(update={"num_envs": 2}), config)
    assert result["frames"] == whole["frames"] and result["episodes"] == 10

    def content(dataset: Path) -> dict:
        frames, episodes = read_frames(dataset), read_episodes(dataset)
        number, actions = column(frames, "episode_index"), column(frames, "executed_action")
        return {(e["env_task"], e["env_index"]): actions[number == e["episode_index"]].tolist() for e in episodes}

    assert content(tmp_path / "cut") == content(tmp_path / "whole" / "demos")


def test_collecting_again_returns_what_is_there_and_other_settings_are_refused(tmp_path):
    first, config = collected(tmp_path)
    again = collect_dataset(ENV, config)
    assert again["episodes"] == first["episodes"] and again["frames"] == first["frames"]
    with pytest.raises(ConfigError, match=r"exists already.*collect.episodes_per_task: there 3, now 4.*another folder"):
        collect_dataset(ENV, config.model_copy(update={"episodes_per_task": 4}))
    with pytest.raises(ConfigError, match=r"seed: there 0, now 1"):
        collect_dataset(ENV, config, seed=1)
    (tmp_path / "demos").rename(tmp_path / "moved")
    moved = collect_dataset(ENV, config.model_copy(update={"dataset": str(tmp_path / "moved"), "shard_episodes": 7}))
    assert moved == again | {"dataset": str(tmp_path / "moved")}, "found in its new place, in shards of any size"
    staging = tmp_path / ".other.collecting"
    staging.mkdir()
    settings = json.loads((tmp_path / "moved" / "collect.json").read_text())
    (staging / "settings.json").write_text(json.dumps({**settings, "seed": 7}))
    (staging / "shard_00000").mkdir()
    other = config.model_copy(update={"dataset": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"unfinished collection with other settings.*seed: there 7"):
        collect_dataset(ENV, other)
    (staging / "shard_00000").rmdir()
    assert collect_dataset(ENV, other)["episodes"] == first["episodes"], "one that failed before its first episode"
    assert json.loads((tmp_path / "other" / "collect.json").read_text())["seed"] == 0


def test_what_was_collected_by_other_workers_is_found_again(tmp_path):
    first, config = collected(tmp_path)
    file = tmp_path / "demos" / "collect.json"
    notes = json.loads(file.read_text())
    notes["env"] |= {"num_workers": 2, "render_devices": "cpu"}  # Two that change no episode.
    file.write_text(json.dumps(notes))
    assert collect_dataset(ENV, config)["frames"] == first["frames"]
    notes["env"]["gravity"] = 3
    file.write_text(json.dumps(notes))
    with pytest.raises(ConfigError, match=r"exists already.*env.gravity: there 3"):
        collect_dataset(ENV, config)


def test_liberos_assets_elsewhere_and_fewer_scenes_change_no_episode():
    old = {"env": {"assets_path": None, "suite": "libero_goal"}}
    assert not _differences(old, {"env": {"assets_path": "elsewhere", "suite": "libero_goal"}})
    assert _differences(old, {"env": {"assets_path": None, "suite": "libero_10"}})
    assert not _differences(old | {"gone": False}, old), "an option that is older than this version, and off"
    assert _differences(old | {"gone": 3}, old)


def test_a_folder_that_is_no_dataset_of_ours_is_not_overwritten(tmp_path):
    (tmp_path / "demos").mkdir()
    (tmp_path / "demos" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"exists already, and `vla-rl collect` did not make it\. Choose") as said:
        collected(tmp_path)
    assert "delete" not in str(said.value)
    assert (tmp_path / "demos" / "thesis.txt").read_text() == "precious"


def test_an_empty_folder_becomes_the_dataset(tmp_path):
    (tmp_path / "demos").mkdir()
    result, _ = collected(tmp_path)
    assert len(read_episodes(tmp_path / "demos")) == result["episodes"] == 6


def test_a_target_that_appears_meanwhile_costs_no_episode(tmp_path):
    config = CollectConfig(dataset=str(tmp_path / "demos"), episodes_per_task=3)
    theirs = tmp_path / "demos" / "theirs.txt"

    def somebody_writes(_: object) -> None:
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("precious")

    with pytest.raises(FileExistsError, match=r"dataset was not written.*demos"):
        collect_dataset(ENV, config, on_progress=somebody_writes)
    theirs.unlink()
    result = collect_dataset(ENV, config)
    assert result["episodes"] == 6 and result["frames_per_second"] == 0, "the staged episodes, none run again"


def test_options_that_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"split: got 'eval'.*'train' or 'validation'"):
        validate(CollectConfig, {"split": "eval"})
    with pytest.raises(ConfigError, match=r"collect\.noise"):
        validate(CollectConfig, {"source": "policy", "noise": 0.1})
    with pytest.raises(ConfigError, match=r"collect\.every_frame: false is only for collect\.source=policy"):
        validate(CollectConfig, {"every_frame": False})
    with pytest.raises((ConfigError, ValidationError), match="train"):
        validate(CollectConfig, {"split": "test"})
    with pytest.raises(ConfigError, match="needs a policy"):
        collected(tmp_path, source="policy")
    with pytest.raises(ConfigError, match=r"unknown \['fly'\]; allowed: reach_red, reach_blue"):
        collected(tmp_path, tasks=("fly",))


def test_lost_episodes_are_tried_again_then_given_up(tmp_path):
    """An environment whose worker dies in episode 1 of each task; the others are unharmed."""
    env = ENV.model_copy(update={"fault": "die", "fault_step": 1, "fault_index": 1, "num_workers": 1, "num_envs": 1})
    config = CollectConfig(dataset=str(tmp_path / "d"), tasks=("reach_red",), episodes_per_task=3, keep="all")
    with pytest.warns(UserWarning, match=r"reach_red train 1: broke 3 times; given up"):
        result = collect_dataset(env, config)
    assert result["episodes"] == 2
    assert [e["env_index"] for e in read_episodes(tmp_path / "d")] == [0, 2]
    assert (result["attempts"], result["success_rate"]) == ({"reach_red": 3}, {"reach_red": 1.0}), "lost, not failed"


def test_disk_full_is_said_and_finished_shards_stay(tmp_path, monkeypatch):
    config = CollectConfig(dataset=str(tmp_path / "d"), episodes_per_task=4, shard_episodes=2)
    real, calls = pq.ParquetWriter.write_table, []

    def fails_later(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fails_later)
    with pytest.raises(OSError, match=r"disk full while writing the dataset shard .*MiB free") as caught:
        collect_dataset(ENV, config)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert [p.name for p in sorted((tmp_path / ".d.collecting").glob("*shard*"))] == ["shard_00000"]
    assert collect_dataset(ENV, config)["episodes"] == 8


KILLED = """
import sys
from sim.dummy import DummyConfig
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset, left_out
config = CollectConfig(dataset=sys.argv[1], episodes_per_task=150, shard_episodes=4, noise=0.2)
collect_dataset(DummyConfig(num_envs=3, image_size=32), config)
"""


@pytest.mark.slow
def test_sigkill_at_random_moments(tmp_path):
    """Killed again and again, the collection ends with each episode once, whole."""
    rng = np.random.default_rng(0)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "d")]
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, env=env)
        deadline = time.monotonic() + 120
        staging = tmp_path / ".d.collecting"
        before = len(list(staging.glob("shard_*")))
        while (
            process.poll() is None and len(list(staging.glob("shard_*"))) < before + 4 and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.3)))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills > 0
    subprocess.run(command, env=env, check=True)
    episodes, frames = read_episodes(tmp_path / "d"), read_frames(tmp_path / "d")
    wanted = {(t, i) for t in ("reach_red", "reach_blue") for i in range(150)}
    assert len(episodes) == 300 and {(e["env_task"], e["env_index"]) for e in episodes} == wanted
    lengths = np.bincount(column(frames, "episode_index"))
    assert lengths.tolist() == [e["length"] for e in episodes]


def test_summary_progress_counts_up(tmp_path, monkeypatch):
    seen = []
    config = CollectConfig(dataset=str(tmp_path / "d"), episodes_per_task=3)
    collect_dataset(ENV, config, on_progress=seen.append)
    assert seen[-1]["episodes"] == seen[-1]["episodes_wanted"] == 6
    assert seen[-1]["frames_per_second"] > 0 and set(seen[-1]["success_rate"]) == {"reach_red", "reach_blue"}
