"""Options of datasets, several of them from the same initial states, and a disk without room for the cache."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_data import demos, edit_frames, read, replace_column, shared  # noqa: F401  (fixtures)

from vla_rl.config import ConfigError, validate
from vla_rl.data import cache as cache_module
from vla_rl.data import recorded
from vla_rl.data import source as source_module
from vla_rl.data.dataset import NOTES_FILE, OBSERVED_EVERY, BCDataset, DataNeeds
from vla_rl.data.hub import check_datasets
from vla_rl.data.importing import demonstration, write_episodes
from vla_rl.data.lerobot_io import encode_png
from vla_rl.data.source import LeRobotSource
from vla_rl.training.config import SFTConfig


def test_no_room_is_noticed_before_the_disk_is_full(demos, monkeypatch):
    usage = shutil.disk_usage(demos)._replace(free=1000)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"decoded images of 'agentview' \(0 MiB needed\)"):
        read(demos)


@pytest.mark.parametrize("rows_at_once", [1, 3, 512])
def test_an_image_that_repeats_is_kept_once_and_read_back_everywhere(demos, monkeypatch, rows_at_once):
    monkeypatch.setattr(source_module, "_BATCH_ROWS", rows_at_once)
    shown = np.random.default_rng(0).integers(0, 2, 60)  # Of two images each, so some repeat and some come back.
    name = "observation.images.agentview"

    def repeat(table: pa.Table) -> pa.Table:
        column = table.column(name).combine_chunks()
        return replace_column(table, name, column.take(pa.array(shown[: len(column)])))

    edit_frames(demos, repeat)
    stored = list(LeRobotSource(demos).images("agentview", None))
    images = read(demos).images["agentview"]
    everything = np.concatenate(stored)
    assert np.array_equal(images[:], everything) and images.shape == everything.shape
    assert len(images.distinct) == 1 + np.count_nonzero(np.diff(shown[: len(images)])) < len(images)
    assert np.array_equal(images[5], everything[5]) and np.array_equal(images[3:7], everything[3:7])
    rows = np.array([[9, 0], [1, 9]])
    assert np.array_equal(images[rows], everything[rows])


def test_options():
    config = validate(SFTConfig, {"datasets": ["a", {"path": "b", "weight": 2}]})
    assert [d.path for d in config.datasets] == ["a", "b"] and config.datasets[1].weight == 2
    assert validate(SFTConfig, {"datasets": "a"}).datasets[0].path == "a"
    with pytest.raises(ConfigError, match=r"datasets"):
        validate(SFTConfig, {"datasets": []})
    with pytest.raises(ConfigError, match=r"wieght: unknown key.*Did you mean 'weight'"):
        validate(SFTConfig, {"datasets": [{"path": "b", "wieght": 2}]}, prefix="sft")


def test_hold_out_parts_no_episodes_of_one_initial_state_in_several_datasets(shared, demos):
    def states(part) -> set[str]:
        return {part.initial_states[e] for e in part.episodes}

    first, second = read(shared), read(demos)
    assert states(first) == states(second), "the same states, under two paths"
    for seed in range(5):
        train, held = BCDataset([first, second], 4).hold_out(0.2, seed)
        learned, kept = (set().union(*map(states, data.parts)) for data in (train, held))
        assert learned.isdisjoint(kept) and (train.num_episodes, held.num_episodes) == (16, 4)
    other = replace(second, initial_states=[f"elsewhere/train/{n}" for n in range(10)])
    train, held = BCDataset([first, other], 4).hold_out(0.2, 0)
    alone = [part.hold_out(0.2, [0, i])[1].rows.tolist() for i, part in enumerate((first, other))]
    assert [part.rows.tolist() for part in held.parts] == alone, "as each alone, where they share none"


def test_a_camera_that_is_said_to_be_another_is_taken_for_it_though_the_dataset_has_one_of_that_name(shared):
    wanted = read(shared, DataNeeds(("agentview",), 7)).images["agentview"]
    mapped = read(shared, DataNeeds(("wrist",), 7), camera_map={"agentview": "wrist"})
    assert mapped.cameras == {"wrist": "agentview"} and np.array_equal(mapped.images["wrist"], wanted)
    swapped = read(
        shared, DataNeeds(("agentview", "wrist"), 7), camera_map={"agentview": "wrist", "wrist": "agentview"}
    )
    assert swapped.cameras == {"agentview": "wrist", "wrist": "agentview"}
    twice = {"datasets": [{"path": "b", "camera_map": {"agentview": "front", "wrist": "front"}}]}
    with pytest.raises(ConfigError, match=r"\['agentview', 'wrist'\] are all said to be 'front'"):
        validate(SFTConfig, twice, prefix="sft")


def test_a_path_in_the_home_folder(demos, monkeypatch):
    monkeypatch.setenv("HOME", str(demos.parent))
    check_datasets(["~/demos"])
    assert LeRobotSource("~/demos").root == demos
    (demos / NOTES_FILE).write_text(json.dumps({OBSERVED_EVERY: 2}))
    assert recorded.read(Path("~/demos")).observed_every == 2
    assert read(Path("~/demos")).path == demos and validate(SFTConfig, {"datasets": "~/demos"}).datasets[0].path == str(
        demos
    )


def test_two_imports_share_no_initial_state_for_their_episodes_numbers(tmp_path):
    """Each counts its own from 0; bags are named by the instruction, others by a task made of it."""
    picture = encode_png(np.zeros((8, 8, 3), np.uint8))

    def imported(name: str, source: str, task: str | None):
        made = [
            demonstration("Move!", n, {"c": [picture] * 2}, np.zeros((2, 8), np.float32), np.zeros((2, 7)), task=task)
            for n in range(2)
        ]
        episodes = (("here", episode) for episode in made)
        write_episodes(episodes, tmp_path / name, fps=10, robot="arm", notes={"source": source})
        return read(tmp_path / name, DataNeeds(("c",), 7))

    bags = [imported(name, "bags", "Move!") for name in ("monday", "tuesday")]
    folders = [imported(name, "folder", None) for name in ("wednesday", "thursday")]
    names = [set(part.state_names(part.name)) for part in (*bags, *folders)]
    assert [len(own) for own in names] == [2] * 4 and len(set().union(*names)) == 8
    simulated = imported("simulated", "expert", "move")
    assert simulated.state_names("simulated") == ["move/train/0", "move/train/1"], "an environment's are everybody's"
