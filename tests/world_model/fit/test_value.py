"""What the value learns from and how it is judged: outcomes and time left of real frames, figures by depth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from vla_rl.data.config import DatasetConfig
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.config import WorldModelConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import open_latents
from world_model.data.outcomes import Outcomes, ValueSamples, steps_left
from world_model.fit.value import DEEPEST, calibrate_value
from world_model.metadata import WorldModelMetadata
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel

ENV = DummyConfig(num_envs=8, tasks=("reach_red",), horizon=12, steps_after_success=4)
MODEL = WorldModelConfig.model_validate(
    {
        "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
        "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 4, "memory": 2},
        "success": {"width": 32, "depth": 1, "dropout": 0},
        "frame_steps": 2,
    }
)
MEAN, STD = np.zeros(ENV.env_spec().state_dim), np.ones(ENV.env_spec().state_dim)


@pytest.fixture(scope="module")
def frames(tmp_path_factory) -> EpisodeFrames:
    folder = tmp_path_factory.mktemp("value") / "episodes"
    options = {"dataset": str(folder), "episodes_per_task": 24, "noise": 1.5, "noise_hold": 4, "keep": "all"}
    collect_dataset(ENV, CollectConfig.model_validate(options))
    spec = ENV.env_spec()
    return EpisodeFrames.of(open_episodes(DatasetConfig(path=str(folder)), spec), 2, spec.action_low, spec.action_high)


@pytest.fixture(scope="module")
def world_model() -> WorldModel:
    metadata = WorldModelMetadata.of(ENV.env_spec(), MEAN, STD)
    torch.manual_seed(0)
    built = WorldModel(MODEL, metadata, build_parts(MODEL, metadata))
    built.add_value_head()
    return built


def clips_of(frames: EpisodeFrames, world_model: WorldModel, tmp_path: Path) -> ClipDataset:
    return ClipDataset([open_latents(frames, world_model.autoencoder, tmp_path)], 4, MEAN, STD)


def test_every_frame_up_to_the_success_has_its_episodes_outcome_and_the_time_left(frames, world_model):
    found = Outcomes.of(frames, world_model.metadata)
    ended = frames.dataset.success[frames.episodes]
    assert ended.any() and not ended.all()
    for episode, succeeded in enumerate(ended):
        rows = found.owner == episode
        here = frames.starts[episode] + np.arange(frames.counts[episode])
        reached = frames.success(here)
        kept = int(reached.argmax()) + 1 if reached.any() else len(here)
        assert found.frame[rows].tolist() == here[:kept].tolist(), "nothing after the first frame with success"
        assert found.success[rows].tolist() == [succeeded] * kept
        assert found.reached[rows].tolist() == reached[:kept].tolist()
        steps = np.minimum(2 * np.arange(kept), frames.steps[episode])
        assert found.steps_left[rows].tolist() == np.maximum(12 - steps, 0).tolist()


def test_an_unknown_task_has_the_longest_horizon(frames, world_model):
    other = world_model.metadata.model_copy(update={"tasks": {"lift": "lift"}, "horizon": {"lift": 40}})
    assert steps_left(frames, other)[frames.starts].tolist() == [40] * len(frames.starts)


def test_samples_are_windows_with_time_and_outcome_and_repeat(frames, world_model, tmp_path):
    clips = clips_of(frames, world_model, tmp_path)
    samples = ValueSamples(clips, world_model.metadata, num_frames=2)
    batch = samples.batch(400, seed=3, step=5)
    assert batch.frames.states.shape[2] == batch.reference.states.shape[2] == len(MEAN) + 1
    left = (batch.frames.states[:, -1, -1] + 2) / 4 * 12
    assert set(left.round().int().tolist()) <= set(range(13)) and len(left.unique()) > 3
    outcomes = Outcomes.of(frames, world_model.metadata)
    assert abs(float(batch.success.float().mean()) - outcomes.success.mean()) < 0.1
    again = samples.batch(400, seed=3, step=5)
    assert torch.equal(batch.frames.latents, again.frames.latents) and torch.equal(batch.success, again.success)
    assert not torch.equal(batch.success, samples.batch(400, seed=3, step=6).success)


def knowing(outcomes: Outcomes, frames: EpisodeFrames, world_model: WorldModel) -> None:
    """Give the value's head the truth of real frames, by their latents, and nothing of imagined ones."""
    images = frames.images(outcomes.frame)
    latents = world_model.encode(images[:, None], frames.states(outcomes.frame)[:, None]).latents[:, 0].half().float()
    known = {row.numpy().tobytes(): s for row, s in zip(latents, outcomes.success, strict=True)}

    def score(windows, reference, instruction):
        seen = [known.get(row.numpy().tobytes()) for row in windows.latents[:, -1]]
        return torch.tensor([0.0 if s is None else 1.0 if s else -1.0 for s in seen])

    assert world_model.value_head is not None
    world_model.value_head.score = score  # type: ignore[method-assign]


def test_figures_tell_real_frames_from_imagined_ones(frames, world_model, tmp_path):
    outcomes = Outcomes.of(frames, world_model.metadata)
    knowing(outcomes, frames, world_model)
    try:
        found = calibrate_value(world_model, clips_of(frames, world_model, tmp_path), seed=0)
    finally:
        del world_model.value_head.score
    assert found is not None and len(found.by_depth) == 1 + DEEPEST
    assert found.open_frames.auc is not None and found.open_frames.auc > 0.95, "frames of one look can end either way"
    assert found.by_depth[0].auc is not None and found.by_depth[0].auc > 0.95
    assert [depth.auc for depth in found.by_depth[1:]] == [None] * DEEPEST, "one logit for all tells nothing"


def test_a_head_that_says_the_opposite_has_no_probability(frames, world_model, tmp_path):
    outcomes = Outcomes.of(frames, world_model.metadata)
    flipped = replace(outcomes, success=~outcomes.success)
    knowing(flipped, frames, world_model)
    try:
        assert calibrate_value(world_model, clips_of(frames, world_model, tmp_path), seed=0) is None
    finally:
        del world_model.value_head.score
