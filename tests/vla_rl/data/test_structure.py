"""What each pixel shows, beside a dataset: recorded with the images, read back, and refused where it does not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.segmentation import CAMERA_PREFIX, pack, structure_file, unpack
from vla_rl.data.structure import open_structure
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

CAMERAS = ("agentview", "wrist")
ENV = TabletopConfig(num_envs=2, cameras=CAMERAS, image_size=32, tasks=("pick_colour",), horizons={"pick_colour": 6})


class Wander(torch.nn.Module, Policy):
    """Chunks of four random actions; insists on seeing pictures alone."""

    def act(self, obs: Observation, generator: Any, temperature: float = 1.0) -> ActionChunk:
        assert set(obs.images) == set(CAMERAS)
        return ActionChunk(np.random.default_rng(0).uniform(-1, 1, (obs.batch_size, 4, 7)).astype(np.float32))


def collect(folder: Path, policy: Wander | None = None) -> Path:
    source = "policy" if policy else "expert"
    values = {"dataset": str(folder), "episodes_per_task": 3, "structure": True, "source": source, "shard_episodes": 2}
    values["keep"] = "all"
    collect_dataset(ENV, CollectConfig.model_validate(values), policy=policy)  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module", params=["expert", "policy"])
def recorded(request, tmp_path_factory) -> Path:
    return collect(tmp_path_factory.mktemp("structure") / "data", Wander() if request.param == "policy" else None)


@pytest.fixture
def copied(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "data", ignore=shutil.ignore_patterns(".cache")))


def opened(folder: Path, size: int | None = None, **options) -> EpisodeDataset:
    config = DatasetConfig.model_validate({"path": str(folder), **options})
    return open_dataset(config, DataNeeds(tuple(options.get("camera_map", {}).values()) or CAMERAS, 7, 8, size))


def test_ids_and_depth_survive_packing():
    rng = np.random.default_rng(0)
    ids, meters = rng.integers(0, 256, (5, 7)).astype(np.uint8), rng.uniform(0, 80, (5, 7))
    found, millimeters = unpack(pack(ids, meters))
    assert np.array_equal(found, ids) and found.dtype == np.uint8 and millimeters.dtype == np.uint16
    assert np.abs(millimeters / 1000 - np.minimum(meters, 65.535)).max() <= 0.00051


def test_what_is_recorded_belongs_to_each_image(recorded):
    """Against the simulator, driven once more through the recorded actions."""
    dataset = opened(recorded)
    structure = open_structure(dataset, {}, depth=True)
    env = ENV.model_copy(update={"structure": True}).make()
    assert structure.depth is not None and set(dataset.images) == set(CAMERAS)
    for episode, name in enumerate(dataset.initial_states):
        task, _, index = name.split("/")
        seen = env.reset(EpisodeSpec(task, index=int(index)))
        for step in range(int(dataset.lengths[episode]) + 1):
            is_last = step == dataset.lengths[episode]
            place = len(dataset.actions) + episode if is_last else int(dataset.starts[episode]) + step
            for camera in CAMERAS:
                ids, millimeters = unpack(seen.images[CAMERA_PREFIX + camera])
                assert np.array_equal(structure.segments[camera][place], ids)
                assert np.array_equal(structure.depth[camera][place], millimeters)
                images = dataset.final_images if is_last else dataset.images
                assert images is not None
                assert np.array_equal(images[camera][episode if is_last else place], seen.images[camera])
            if not is_last:
                env.apply(dataset.executed_actions[place])
                seen = env.observe()


def test_without_being_asked_for_nothing_is_recorded(tmp_path):
    values = {"dataset": str(tmp_path / "plain"), "episodes_per_task": 1, "keep": "all"}
    collect_dataset(ENV, CollectConfig.model_validate(values))
    assert not (tmp_path / "plain" / "structure").exists()
    with pytest.raises(DatasetError, match=r"episode_000000.npz: missing; .* guided by segmentation. Collect with"):
        open_structure(opened(tmp_path / "plain"), {})


def test_cameras_may_have_other_names_and_images_another_size(copied):
    dataset = opened(copied, size=16, camera_map={"agentview": "front"})
    structure = open_structure(dataset, {"agentview": "front"})
    full = open_structure(opened(copied), {}).segments["agentview"]
    assert set(structure.segments) == {"front"} and structure.segments["front"].shape[1:] == (16, 16)
    assert set(np.unique(structure.segments["front"])) <= set(np.unique(full)), "no id is made up between two"
    assert structure.depth is None


def rewrite(change: Callable[[dict[str, np.ndarray]], dict[str, Any]]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        with np.load(file) as stored:
            arrays = dict(stored)
        np.savez_compressed(file, allow_pickle=True, **change(arrays))  # type: ignore[arg-type]

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "episode_000001.npz: missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:200]), "damaged"),
        (lambda file: file.write_bytes(b"not a zip"), "damaged"),
        (
            rewrite(lambda a: {k: v for k, v in a.items() if "wrist" not in k}),
            "has no 'segments_wrist'; it holds depth_",
        ),
        (rewrite(lambda a: {k: v for k, v in a.items() if "depth" not in k}), "has no 'depth_agentview'"),
        (rewrite(lambda a: a | {"segments_wrist": a["segments_wrist"][:-2]}), "the episode has .* control steps"),
        (rewrite(lambda a: a | {"segments_wrist": a["segments_wrist"].astype(np.int64)}), "must be uint8"),
        (rewrite(lambda a: a | {"segments_wrist": a["segments_wrist"].astype(object)}), "must be uint8"),
        (rewrite(lambda a: a | {"segments_wrist": a["segments_wrist"][:, :, :20]}), "another shape"),
        (rewrite(lambda a: a | {"segments_wrist": np.zeros((len(a["segments_wrist"]), 5000, 5000), np.uint8)}), "4096"),
    ],
)
def test_structure_that_does_not_fit_is_refused(copied, damage, message):
    damage(structure_file(copied, 1))
    with pytest.raises(DatasetError, match=message):
        open_structure(opened(copied), {}, depth=True)


def test_environments_that_draw_none_are_refused(tmp_path):
    values = {"dataset": str(tmp_path / "data"), "episodes_per_task": 1, "structure": True}
    with pytest.raises(
        ConfigError, match=r"collect\.structure: sim\.dummy:DummyConfig draws no segmentation; tabletop, libero"
    ):
        collect_dataset(DummyConfig(), CollectConfig.model_validate(values))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"without collect\.keyframes, collect\.structure and collect\.objects"):
        CollectConfig.model_validate({"imagined": True, "source": "policy", "structure": True})
