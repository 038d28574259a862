"""The world model that ships: small, and better than repeating the first frame on episodes that it has never seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.tabletop import TabletopConfig
from vla_rl.data.config import DatasetConfig
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.config import ImaginationConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.metadata import resolve_path
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.measure import TrustData, measure
from world_model.trust.subject import OpenLoop
from world_model.types import LoggedEpisode


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> list[LoggedEpisode]:
    """Of the noisy scripted expert on states that nothing was fitted on."""
    folder = tmp_path_factory.mktemp("pretrained") / "episodes"
    tasks = ("push_to_zone", "pick_place", "stack")
    env = TabletopConfig(num_envs=3, tasks=tasks, steps_after_success=8)
    collect_dataset(
        env,
        CollectConfig(
            dataset=str(folder), episodes_per_task=3, split="validation", start_index=9000, noise=0.3, keep="all"
        ),
    )
    spec = env.env_spec()
    dataset = open_episodes(DatasetConfig(path=str(folder)), spec)
    return logged_episodes(EpisodeFrames.of(dataset, 8, spec.action_low, spec.action_high))


def test_it_is_small() -> None:
    files = [f for f in Path(resolve_path("pretrained:tabletop")).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 15e6


def test_it_imagines_what_the_actions_do(episodes) -> None:
    world_model = OpenLoop(load_world_model("pretrained:tabletop"), ImaginationConfig())
    config = MeasureConfig(inverse_updates=0, auc_frames=0)
    found = measure(world_model, TrustData(episodes), config).report.figures
    assert found["skill"].value > 0.3, "of the error of repeating the first frame, this much is gone"
    assert found["action_gain"].low > 1.2, "other actions lead elsewhere"
    assert np.isfinite(found["latent_error"].value)
