"""Latent bootstrapping: what the dynamics sees of its own frames, a cache that is bounded, detached and made anew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from dummy_fit import ENV, MODEL, config, stop_fitting, weights

from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig
from world_model.config import WorldModelConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import open_latents
from world_model.fit.config import FitConfig
from world_model.fit.fit import fit
from world_model.metadata import WorldModelMetadata
from world_model.methods.clip_source import latent_bootstrap
from world_model.methods.clip_source.latent_bootstrap import LatentBootstrap
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel


@pytest.fixture(scope="module")
def world_model() -> WorldModel:
    metadata = WorldModelMetadata.of(ENV.env_spec(), np.zeros(8), np.ones(8))
    torch.manual_seed(0)
    model = WorldModelConfig.model_validate(MODEL)
    built = WorldModel(model, metadata, build_parts(model, metadata))
    for parameter in built.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return built


@pytest.fixture(scope="module")
def clips(episodes, world_model) -> ClipDataset:
    spec = ENV.env_spec()
    frames = EpisodeFrames.of(
        open_episodes(DatasetConfig(path=str(episodes)), spec), 4, spec.action_low, spec.action_high
    )
    return ClipDataset([open_latents(frames, world_model.autoencoder)], 3, np.zeros(8), np.ones(8))


@pytest.fixture(autouse=True)
def soon() -> Iterator[pytest.MonkeyPatch]:
    """The share rises at once, and the cache of six episodes is made anew every ten updates."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"START": 0.0, "RAMP": 0.1, "REFRESH_EVERY": 10, "EPISODES": 6}.items():
            patch.setattr(latent_bootstrap, name, value)
        yield patch


def make(clips: ClipDataset, world_model: WorldModel) -> LatentBootstrap:
    return LatentBootstrap(clips, world_model.dynamics, 100, seed=1)


def test_the_share_rises(clips, world_model, soon) -> None:
    soon.setattr(latent_bootstrap, "START", 0.2)
    soon.setattr(latent_bootstrap, "RAMP", 0.5)
    soon.setattr(latent_bootstrap, "SHARE", 0.8)
    rising = make(clips, world_model)
    assert [round(rising.share(step), 3) for step in (0, 20, 45, 70, 100)] == [0, 0, 0.4, 0.8, 0.8]
    soon.setattr(latent_bootstrap, "SHARE", 0.0)
    clip, seen = make(clips, world_model).batch(4, 50)
    assert seen is None and torch.equal(clip.frames.latents, clips.batch(4, 1, 50).frames.latents)


def test_what_is_seen_was_imagined_and_what_is_predicted_is_real(clips, world_model) -> None:
    bootstrap = make(clips, world_model)
    clip, seen = bootstrap.batch(64, 10)
    assert seen is not None
    part = clips.parts[0]
    changed = (seen.latents != clip.frames.latents).flatten(1).any(1)
    assert 20 < changed.sum() < 44
    torch.testing.assert_close(seen.latents[:, 0], clip.frames.latents[:, 0], atol=2e-3, rtol=0)  # The first is real.
    real = torch.from_numpy(np.asarray(part.latents, np.float32))
    for row in range(64):
        frames = clip.frames.latents[row]
        assert all(any(torch.equal(frame, known) for known in real) for frame in frames[:2])
    cached = torch.cat([episode.latents for episode in bootstrap.cache.values()]).float()
    for row in torch.nonzero(changed).flatten().tolist():
        assert all(any(torch.equal(frame, known) for known in cached) for frame in seen.latents[row, 1:])


def test_the_cache_is_bounded_detached_and_made_anew(clips, world_model, soon) -> None:
    soon.setattr(latent_bootstrap, "MAX_FRAMES", 12)
    soon.setattr(latent_bootstrap, "EPISODES", 100)
    bootstrap = make(clips, world_model)
    before = None
    for step in (10, 20, 30):
        bootstrap.batch(4, step)
        assert 0 < bootstrap.num_frames <= 12
        for episode in bootstrap.cache.values():
            assert not episode.latents.requires_grad and episode.latents.grad_fn is None
            assert episode.latents.dtype == torch.float16 and episode.latents.device.type == "cpu"
        keys = set(bootstrap.cache)
        assert keys != before
        before, held = keys, bootstrap.cache
        bootstrap.batch(4, step + 1)
        assert bootstrap.cache is held, "refreshed at every tenth step alone"
    clip, seen = bootstrap.batch(8, 40)
    assert seen is not None
    loss, _ = world_model.dynamics.loss(clip, torch.Generator().manual_seed(0), seen)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in world_model.dynamics.parameters())  # type: ignore[attr-defined]
    world_model.zero_grad()


def test_it_uses_the_dynamics_as_it_is_now(clips, world_model) -> None:
    bootstrap = make(clips, world_model)
    bootstrap.refresh(10)
    first = {key: episode.latents for key, episode in bootstrap.cache.items()}
    bootstrap.refresh(10)
    assert all(torch.equal(first[key], episode.latents) for key, episode in bootstrap.cache.items())
    weight = next(world_model.dynamics.parameters())  # type: ignore[attr-defined]
    weight.data += 0.5
    bootstrap.refresh(10)
    weight.data -= 0.5
    assert any(not torch.equal(first[key], episode.latents) for key, episode in bootstrap.cache.items())


def test_a_stopped_fit_goes_on_to_the_same_result(episodes, tmp_path, monkeypatch, soon) -> None:
    soon.setattr(latent_bootstrap, "REFRESH_EVERY", 2)
    stage = {"steps": 5, "batch_size": 4, "optim": {"warmup_steps": 1}}
    soon.setattr(latent_bootstrap, "SHARE", 0.9)
    soon.setattr(latent_bootstrap, "EPISODES", 4)
    options = config(episodes, dynamics=stage, clip_source={"kind": "latent_bootstrap"})
    whole = fit(options, ENV.env_spec(), tmp_path / "whole", seed=1)
    plain = fit(config(episodes, dynamics=stage), ENV.env_spec(), tmp_path / "plain", seed=1)
    assert weights(whole)["dynamics.safetensors"] != weights(plain)["dynamics.safetensors"]
    stop_fitting(monkeypatch, 3 + 3)  # The autoencoder's three updates, and three of the dynamics'.
    with pytest.raises(KeyboardInterrupt):
        fit(options, ENV.env_spec(), tmp_path / "run", seed=1)
    monkeypatch.undo()
    assert weights(fit(options, ENV.env_spec(), tmp_path / "run", seed=1)) == weights(whole)


def test_what_could_not_resume_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"save_every: got 3, must be a multiple of 10 with"):
        validate(FitConfig, {"clip_source": {"kind": "latent_bootstrap"}, "save_every": 3})
