"""Where objects are, beside a dataset: told by the simulator, recorded at each control step, read back, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from sim.metaworld import MetaWorldConfig
from sim.tabletop import TabletopConfig
from sim.vector.processes import ProcessVecEnv
from sim.vector.runner import InlineVecEnv
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import FINAL_OBJECT_POSES, OBJECT_POSES
from vla_rl.data.objects import object_features, object_names, open_object_poses
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import collect as run_episodes
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

TASKS = ("push_to_zone", "pick_colour")
ENV = TabletopConfig(num_envs=2, image_size=32, tasks=TASKS, horizons=dict.fromkeys(TASKS, 6))
DUMMY = DummyConfig(num_envs=2, tasks=("reach_red",), horizon=8)


class Wander(torch.nn.Module, Policy):
    """Chunks of four random actions."""

    chunk_size = 4

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.random.default_rng(0).uniform(-1, 1, (obs.batch_size, 4, 7)).astype(np.float32))


def collect(folder: Path, env: Any = ENV, **options: Any) -> Path:
    values = {"dataset": str(folder), "episodes_per_task": 2, "objects": True, "keep": "all", **options}
    policy: Any = Wander() if options.get("source") == "policy" else None
    collect_dataset(env, CollectConfig.model_validate(values), policy=policy)
    return folder


@pytest.mark.parametrize("options", [{}, {"source": "policy"}, {"source": "policy", "every_frame": False}])
def test_what_is_recorded_is_where_the_simulator_has_them(options, tmp_path):
    """Against the simulator, driven once more through the recorded actions."""
    from vla_rl.data.source import LeRobotSource, vectors

    folder = collect(tmp_path / "data", **options)
    found = open_object_poses(folder)
    assert found is not None
    names, poses, final = found
    assert names == TabletopConfig.object_names and final.shape == (4, 8, 4)
    source = LeRobotSource(folder)
    actions = np.concatenate([vectors(table, "executed_action") for table in source.batches(["executed_action"])])
    env, row = ENV.model_copy(update={"objects": True}).make(), 0
    for episode, name in enumerate(source.initial_states()):
        task, split, index = name.split("/")
        env.reset(EpisodeSpec(task, split, int(index)))  # type: ignore[arg-type]
        for _ in range(int(source.lengths[episode])):
            np.testing.assert_allclose(poses[row], env.object_poses(), atol=1e-6)
            env.apply(actions[row])
            row += 1
        np.testing.assert_allclose(final[episode], env.object_poses(), atol=1e-6)
    env.close()
    assert row == len(poses)


def test_a_pose_is_in_meters_and_radians_and_nan_where_the_scene_lacks_the_object():
    env = ENV.model_copy(update={"objects": True}).make()
    env.reset(EpisodeSpec("push_to_zone", "train", 3))
    poses = dict(zip(env.spec.objects, env.object_poses(), strict=True))
    block, zone = poses["block"], poses["zone"]
    assert -0.11 <= block[0] <= -0.03 and abs(block[3]) <= 0.15 and block[2] == pytest.approx(0.03, abs=0.01)
    assert 0.09 <= zone[0] <= 0.15 and zone[3] == 0
    assert all(np.isnan(poses[name]).all() for name in ("plate", "bowl", "base", "block_b"))
    env._put("block", 0.0, 0.0, 0.7)
    assert env.object_poses()[0, 3] == pytest.approx(0.7, abs=1e-6)
    env.close()


@pytest.mark.parametrize("kind", [InlineVecEnv, ProcessVecEnv])
def test_a_step_tells_poses_before_each_action_and_after_the_last(kind):
    config = DUMMY.model_copy(update={"objects": True, "num_workers": int(kind is ProcessVecEnv)})
    env = kind(config, 2)
    try:
        env.reset([EpisodeSpec("reach_red", "train", i) for i in range(2)])
        told = env.step(np.zeros((2, 3, 7), np.float32)).info["objects"]
        assert [poses.shape for poses in told] == [(4, 2, 4)] * 2 and told[0].dtype == np.float32
        assert (told[0] == told[0][0]).all() and not np.array_equal(told[0], told[1])
        specs = [EpisodeSpec("reach_red", "train", i) for i in range(3)]
        episodes = run_episodes(Wander(), env, specs)  # type: ignore[arg-type]
        assert not any("objects" in episode.info for episode in episodes), "they are of steps, not of chunks"
    finally:
        env.close()


def test_without_the_option_nothing_changes(tmp_path):
    folder = collect(tmp_path / "plain", DUMMY, objects=False)
    assert open_object_poses(folder) is None
    assert OBJECT_POSES not in json.loads((folder / "meta" / "info.json").read_text())["features"]
    env = InlineVecEnv(DUMMY, 1)
    env.reset([EpisodeSpec("reach_red", "train", 0)])
    assert "objects" not in env.step(np.zeros((1, 2, 7), np.float32)).info


def test_the_feature_names_its_numbers():
    feature = object_features(["block", "my.plate"])
    assert feature[OBJECT_POSES]["shape"] == (8,) and feature[OBJECT_POSES]["names"][4:6] == [
        "my.plate.x",
        "my.plate.y",
    ]
    assert object_names(feature) == ("block", "my.plate") and object_features([]) == {} and object_names({}) == ()


def test_poses_without_the_last_ones_are_refused(tmp_path):
    import pyarrow.parquet as pq

    folder = collect(tmp_path / "data", DUMMY)
    for file in (folder / "meta" / "episodes").rglob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns([FINAL_OBJECT_POSES]), file)
    with pytest.raises(DatasetError, match=r"final_object_poses of no numbers for 8; collect it again"):
        open_object_poses(folder)


def test_a_simulator_that_does_not_tell_is_refused(tmp_path):
    metaworld = MetaWorldConfig.model_construct(kind="metaworld")
    with pytest.raises(ConfigError, match=r"collect\.objects: metaworld does not tell where its objects are"):
        collect(tmp_path / "none", metaworld)
    with pytest.raises(ValueError, match=r"objects\s+Extra inputs are not permitted"):
        MetaWorldConfig.model_validate({"objects": True})
    with pytest.raises(ValueError, match=r"collect\.imagined: .*collect\.objects"):
        CollectConfig.model_validate({"imagined": True, "source": "policy", "objects": True})


def test_a_collection_goes_on_with_its_poses(tmp_path, monkeypatch):
    whole = collect(tmp_path / "whole", DUMMY, shard_episodes=1)
    from vla_rl.workflows import record_dataset

    real, calls = record_dataset.write_shard, []

    def stopping(*arguments: Any) -> None:
        real(*arguments)
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(record_dataset, "write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path / "stopped", DUMMY, shard_episodes=1)
    monkeypatch.setattr(record_dataset, "write_shard", real)
    stopped = collect(tmp_path / "stopped", DUMMY, shard_episodes=1)
    for one, other in zip(open_object_poses(whole) or (), open_object_poses(stopped) or (), strict=True):
        np.testing.assert_array_equal(one, other)
    shutil.rmtree(stopped)
