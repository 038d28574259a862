"""Fitting members of the posterior: resamples of initial states, its own stage, and what becomes of old members."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dummy_fit import ENV, KEPT, SPEC, config, stop_fitting, weights

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import open_latents
from world_model.fit.fit import fit
from world_model.fit.posterior import check_members, resample
from world_model.fit.stage import updates_kept
from world_model.model.dynamics import TransformerConfig
from world_model.model.wan import WanConfig
from world_model.model.world_model import load_world_model

POSTERIOR = {"steps": 3, "batch_size": 5, "members": 2, "rank": 2, "optim": {"warmup_steps": 1}}


@pytest.fixture
def base(plain) -> Path:
    return plain


def on_top(episodes: Path, start: Path, folder: Path, **options: Any) -> Path:
    values = {**KEPT, "start_from": str(start), "posterior": POSTERIOR, **options}
    return fit(config(episodes, **values), SPEC, folder, seed=1)


def test_members_are_fitted_on_top_and_change_nothing_else(episodes, base, tmp_path, monkeypatch) -> None:
    found = on_top(episodes, base, tmp_path / "run")
    before, after = load_world_model(base), load_world_model(found)
    assert after.config.posterior is not None and after.config.posterior.members == 2
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    up = after.dynamics.posterior.up
    assert up[:2].any() and up[2:].any() and not torch.equal(up[:2], up[2:])
    assert after.metadata.success_probability == before.metadata.success_probability is not None
    assert after.metadata.success_threshold == before.metadata.success_threshold
    budget = stop_fitting(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        on_top(episodes, base, tmp_path / "cut")
    options = config(episodes, **{**KEPT, "start_from": str(base), "posterior": POSTERIOR})
    assert updates_kept(options, tmp_path / "cut") == 2
    budget[0] = 10
    assert weights(on_top(episodes, base, tmp_path / "cut")) == weights(found)
    assert budget[0] == 9, "it went on after the two updates"


def test_members_stay_unless_the_dynamics_is_fitted(episodes, base, tmp_path, caplog) -> None:
    found = on_top(episodes, base, tmp_path / "run")
    kept = load_world_model(on_top(episodes, found, tmp_path / "kept", posterior={"steps": 0}))
    assert torch.equal(kept.dynamics.posterior.up, load_world_model(found).dynamics.posterior.up)
    dynamics = {"steps": 1, "batch_size": 4}
    with caplog.at_level(logging.WARNING):
        dropped = on_top(episodes, found, tmp_path / "dropped", posterior={"steps": 0}, dynamics=dynamics)
    assert load_world_model(dropped).config.posterior is None
    assert "has members, which belong to its dynamics" in caplog.text


def test_what_no_member_could_learn_from_is_refused_before_anything_is_fitted(episodes, tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"posterior\.batch_size: got 1 for 2 members.*never see a clip"):
        config(episodes, posterior={**POSTERIOR, "batch_size": 1})
    with pytest.raises(ConfigError, match=r"world_model\.posterior\.steps: not for dynamics of kind 'wan'"):
        check_members(WanConfig.model_validate({"transformer": {}}))
    monkeypatch.setattr(TransformerConfig, "can_have_members", False)
    with pytest.raises(ConfigError, match=r"world_model\.posterior\.steps: not for dynamics of kind 'transformer'"):
        fit(config(episodes, posterior=POSTERIOR), SPEC, tmp_path / "run")
    assert not (tmp_path / "run" / "stages").exists()


def test_a_resample_draws_initial_states_with_all_their_episodes(episodes, base, tmp_path) -> None:
    dataset = open_episodes(DatasetConfig(path=str(episodes)), SPEC)
    frames = EpisodeFrames.of(dataset, 4, SPEC.action_low, SPEC.action_high)
    dim = ENV.env_spec().state_dim
    part = open_latents(frames, load_world_model(base).autoencoder, tmp_path)
    clips = ClipDataset([part, part], 3, np.zeros(dim), np.ones(dim))
    frames.dataset.initial_states[1] = frames.dataset.initial_states[0]
    one, other = resample(clips, [0, 1])
    assert one.tolist() == other.tolist(), "cuts of one dataset"
    assert one.tolist() != resample(clips, [0, 2])[0].tolist()
    assert (frames.number[one] > 0).all()
    times = np.array([(frames.owner[one] == e).sum() for e in range(24)]) / (frames.counts - 1)
    assert times[0] == times[1] and (times == 0).any() and times.max() > 1 and times.sum() - times[0] == 23
