"""Embedded episodes: what was seen, when, by whom; recorded episodes embed to the same as those just run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recorded_episodes
import torch
from reach_policy import ReachPolicy

from real_robot.operator.recorder import Recording
from sim.dummy import DummyConfig
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.embeddings import FACTS_FILE, TENSORS_FILE, EmbeddedEpisodes, embed_dataset, embed_episodes
from vla_rl.rollout.runner import collect
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

HASH = "0123456789abcdef"
ENV = DummyConfig(num_envs=1, image_size=32, horizon=11)


class SeeingPolicy(ReachPolicy):
    """Embeds the state, the image's mean and the instruction's length, and remembers what it saw when it acted."""

    def __init__(self) -> None:
        super().__init__(speed=0.45, noise=0.2)
        self.seen: list[np.ndarray] = []

    def embed(self, obs: Observation) -> torch.Tensor:
        means = obs.images["agentview"].mean((1, 2)) / 255
        lengths = np.array([[len(text)] for text in obs.instruction])
        return torch.from_numpy(np.concatenate([obs.state, means, lengths], axis=1).astype(np.float32))

    def act(self, obs: Observation, generator=None, temperature: float = 1.0) -> ActionChunk:
        self.seen += list(self.embed(obs).numpy())
        return super().act(obs, generator, temperature)


def record(folder: Path, policy: ReachPolicy, version: str = f"reach {HASH[:12]}", source: str = "policy") -> Path:
    config = CollectConfig.model_validate({"source": source, "dataset": str(folder), "episodes_per_task": 3})
    collect_dataset(ENV, config, policy=policy if source == "policy" else None, policy_version=version)
    return folder


def test_recorded_episodes_embed_to_what_the_policy_saw(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    folder = record(tmp_path / "data", policy)
    seen = np.stack(policy.seen)
    found = embed_dataset(policy, DatasetConfig(path=str(folder)), HASH)
    np.testing.assert_array_equal(found.embeddings, seen)  # One environment: the order of acting is that of the data.
    assert set(found.success) == {True, False}
    assert list(found.counts) == [-(-steps // 4) for steps in found.num_steps]
    assert found.initial_states[:2] == ("reach_red/train/0", "reach_red/train/1")
    assert found.tasks == ("reach_red",) * 3 + ("reach_blue",) * 3
    assert found.instructions[3] == "move to the blue square"
    assert (found.every, found.policy_hash, found.dim) == (4, HASH, 12)


def test_images_that_were_not_recorded_are_not_embedded(tmp_path: Path) -> None:
    """With `collect.every_frame=false` an image stands in for those after it, up to the next chunk's."""
    policy, folder = SeeingPolicy(), tmp_path / "data"
    values = {"source": "policy", "dataset": str(folder), "episodes_per_task": 2, "every_frame": False}
    version = f"reach {HASH[:12]}"
    collect_dataset(ENV, CollectConfig.model_validate(values), policy=policy, policy_version=version)
    seen, config = np.stack(policy.seen), DatasetConfig(path=str(folder))
    np.testing.assert_array_equal(embed_dataset(policy, config, HASH).embeddings, seen)
    with pytest.raises(DatasetError, match=r"an image every 4 control steps, and one every 2 is .* a multiple of 4"):
        embed_dataset(policy, config, HASH, every=2)


def test_episodes_just_run_embed_likewise() -> None:
    policy = SeeingPolicy()
    with_env = ENV.build()
    episodes = collect(policy, with_env, [EpisodeSpec("reach_red", "train", i) for i in range(4)])
    with_env.close()
    found = embed_episodes(policy, episodes, HASH)
    np.testing.assert_array_equal(found.embeddings, np.stack(policy.seen))
    np.testing.assert_array_equal(found.episode(1), found.embeddings[found.counts[0] : found.counts[:2].sum()])
    assert list(found.success) == [episode.success for episode in episodes]
    assert list(found.num_steps) == [episode.length for episode in episodes]
    assert found.actions.shape == (found.counts.sum(), 4, 7)


def test_other_steps_between_embeddings_and_the_chunk_at_an_episodes_end(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    folder = record(tmp_path / "data", policy)
    found = embed_dataset(policy, DatasetConfig(path=str(folder)), HASH, every=2)
    every_chunk = embed_dataset(policy, DatasetConfig(path=str(folder)), HASH)
    assert list(found.counts) == [-(-steps // 2) for steps in found.num_steps]
    np.testing.assert_array_equal(found.episode(0)[::2], every_chunk.episode(0))
    last = found.actions[found.counts[0] - 1]
    np.testing.assert_array_equal(last[2:], np.repeat(last[1:2], 2, axis=0))  # Past the end its last action.


def test_selecting_joining_and_saving(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    found = embed_dataset(policy, DatasetConfig(path=str(record(tmp_path / "data", policy))), HASH)
    parts = [found.select(found.success), found.select(~found.success)]
    joined = EmbeddedEpisodes.concatenate(parts)
    order = np.concatenate([np.flatnonzero(found.success), np.flatnonzero(~found.success)])
    joined.save(tmp_path / "embedded")
    again = EmbeddedEpisodes.load(tmp_path / "embedded")
    assert again.initial_states == tuple(found.initial_states[i] for i in order)
    for row, number in enumerate(order):
        np.testing.assert_array_equal(again.episode(row), found.episode(number))
    assert len(found.select(np.zeros(6, bool))) == 0
    with pytest.raises(ValueError, match="differ in every"):
        other = embed_dataset(policy, DatasetConfig(path=str(tmp_path / "data")), HASH, 2)
        EmbeddedEpisodes.concatenate([found, other])
    (tmp_path / "embedded" / TENSORS_FILE).write_bytes(b"{")
    with pytest.raises(DatasetError, match="not readable embedded episodes"):
        EmbeddedEpisodes.load(tmp_path / "embedded")
    (tmp_path / "embedded" / FACTS_FILE).unlink()
    with pytest.raises(DatasetError, match="not readable embedded episodes"):
        EmbeddedEpisodes.load(tmp_path / "embedded")


def test_another_policys_episodes_are_refused_unless_asked_for(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    config = DatasetConfig(path=str(record(tmp_path / "data", policy, "reach ffffffffffff")))
    with pytest.raises(DatasetError, match=r"another policy \(reach ffffffffffff\); this one is 0123456789ab"):
        embed_dataset(policy, config, HASH)
    assert len(embed_dataset(policy, config, HASH, same_policy=False)) == 6


@pytest.mark.parametrize("column", ["observation.state", "action"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, column: str) -> None:
    folder = record(tmp_path / "data", ReachPolicy())
    file = next((folder / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    values = table.column(column).to_pylist()
    values[3][0] = float("nan")
    replaced = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), table.schema.field(column), replaced), file)
    with pytest.raises(DatasetError, match=rf"{column} holds NaN or infinite values in 1 frames, first in episode 0"):
        embed_dataset(ReachPolicy(), DatasetConfig(path=str(folder)), HASH)


def test_demonstrations_are_not_episodes_of_the_policy(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    folder = record(tmp_path / "data", policy, source="expert")
    with pytest.raises(DatasetError, match="no episode in which the policy alone acted; got 6 others"):
        embed_dataset(policy, DatasetConfig(path=str(folder)), HASH)


def test_some_of_each_instruction(tmp_path: Path) -> None:
    policy = SeeingPolicy()
    folder = record(tmp_path / "data", policy)
    found = embed_dataset(policy, DatasetConfig(path=str(folder), episodes_per_task=2), HASH)
    assert found.tasks == ("reach_red",) * 2 + ("reach_blue",) * 2


def test_two_recordings_of_a_robot_share_no_initial_state_and_a_copy_of_one_shares_all(tmp_path: Path) -> None:
    """Their episodes' numbers begin at 0 in each: that says nothing of how they began."""
    for name, instruction in (("monday", "move"), ("tuesday", "move"), ("simulated", "move to the red square")):
        recording = Recording(tmp_path / name, 10, "toy")
        for index in range(2):
            one = recorded_episodes.episode(index, ["policy"] * 5, True)
            task = "reach_red" if name == "simulated" else instruction
            recording.add(replace(one, task=task, instruction=instruction), {"agentview": (32, 32)})
        recording.close()
    shutil.copytree(tmp_path / "monday", tmp_path / "copies" / "monday")
    policy = SeeingPolicy()
    found = {
        name: embed_dataset(policy, DatasetConfig(path=str(tmp_path / name)), HASH, same_policy=False)
        for name in ("monday", "tuesday", "copies/monday", "simulated")
    }
    assert not set(found["monday"].initial_states) & set(found["tuesday"].initial_states)
    assert found["monday"].initial_states == found["copies/monday"].initial_states
    assert found["monday"].tasks == ("move", "move")
    assert found["simulated"].initial_states == ("reach_red/train/0", "reach_red/train/1")
