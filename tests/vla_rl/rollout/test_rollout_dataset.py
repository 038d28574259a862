"""Episodes run for another purpose, written as a dataset: the same as `vla-rl collect` writes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.dummy import DummyConfig
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.source import LeRobotSource
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.episode_recording import RolloutWriter
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec
from vla_rl.workflows.record_dataset import collect_dataset

ENV = DummyConfig(num_envs=3, image_size=32, cameras=("agentview", "wrist"), tasks=("reach_red",))
SPECS = [EpisodeSpec("reach_red", "train", i) for i in range(5)]


def chunked_policy():
    """It draws 4 actions at a time."""
    policy = OpenVLAConfig(chunk_size=4, image_size=32, cameras=("agentview",)).build(ENV.env_spec())
    low = np.full(8, -1.0)
    policy.set_norm_stats({"q01": low[:7], "q99": -low[:7]}, {"q01": low, "q99": -low})
    return policy


def opened(folder: Path) -> EpisodeDataset:
    return open_dataset(DatasetConfig(path=str(folder)), DataNeeds(ENV.cameras, 7))


def written(folder: Path, *batches: Sequence[Episode]) -> int:
    writer = RolloutWriter(folder, ENV.env_spec(), "v1", {"why": "a test"})
    for batch in batches:
        writer.add(batch)
    return writer.finish()


@pytest.mark.parametrize("every_frame", [True, False])
def test_it_is_what_collect_writes_of_the_same_episodes(tmp_path: Path, every_frame: bool) -> None:
    policy = chunked_policy()
    options = {"source": "policy", "episodes_per_task": 5, "temperature": 0.0, "every_frame": every_frame}
    config = CollectConfig.model_validate({"dataset": str(tmp_path / "collected"), **options})
    collect_dataset(ENV, config, policy=policy, policy_version="v1")
    with closing(ENV.build(record_frames=every_frame)) as env:
        episodes = collect(policy, env, SPECS, temperature=0)
    assert written(tmp_path / "written", episodes[:2], episodes[2:]) == 5
    order = [opened(tmp_path / "collected").initial_states.index(f"reach_red/train/{i}") for i in range(5)]
    one, other = opened(tmp_path / "collected"), opened(tmp_path / "written")
    assert other.initial_states == [one.initial_states[e] for e in order] and one.observed_every == other.observed_every
    assert np.array_equal(one.lengths[order], other.lengths) and np.array_equal(one.success[order], other.success)
    rows = np.concatenate([np.arange(one.starts[e], one.starts[e] + one.lengths[e]) for e in order])
    for name in ("state", "actions", "executed_actions", "source", "succeeded"):
        assert np.array_equal(getattr(one, name)[rows], getattr(other, name)), name
    assert one.final_images is not None and other.final_images is not None
    assert one.final_state is not None and other.final_state is not None
    for camera in ENV.cameras:
        assert np.array_equal(one.images[camera][rows], other.images[camera])
        assert np.array_equal(one.final_images[camera][order], other.final_images[camera])
    assert np.array_equal(one.final_state[order], other.final_state)
    notes = json.loads((tmp_path / "written" / "collect.json").read_text())
    assert (notes["why"], notes["attempts"]) == ("a test", {"reach_red": 5})


def test_lost_episodes_are_left_out_and_a_dataset_is_replaced(tmp_path: Path) -> None:
    with closing(ENV.build()) as env:
        episodes = collect(chunked_policy(), env, SPECS, temperature=0)
    broken = replace(episodes[0], lost=True)
    folder = tmp_path / "written"
    assert written(folder, [broken], [broken, *episodes[1:]]) == 4
    assert LeRobotSource(folder).initial_states() == [f"reach_red/train/{i}" for i in range(1, 5)]
    assert written(folder, [broken]) == 0, "nothing to write: what is there stays"
    assert written(folder, episodes[:2]) == 2
    assert len(LeRobotSource(folder).lengths) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["written"]
