"""Fitting the inverse dynamics of the dummy's world model: its folder, the errors it is judged by, resuming."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dummy_fit import KEPT, SPEC, config, keep_killed, weights

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import open_latents
from world_model.fit import inverse as inverse_module
from world_model.fit.config import FitConfig
from world_model.fit.fit import fit
from world_model.fit.inverse import calibrate_inverse, real_pairs
from world_model.fit.stage import updates_kept
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Actions

INVERSE = {"steps": 60, "batch_size": 16, "optim": {"lr": 6e-3, "warmup_steps": 5}}


@pytest.fixture(scope="module")
def fitted(episodes, plain, tmp_path_factory) -> Path:
    """Beside its run lies `killed`, the run as it was after 50 updates."""
    folder = tmp_path_factory.mktemp("inverse")
    with pytest.MonkeyPatch.context() as patch:
        keep_killed(patch, folder / "run", "inverse")
        return fit(on_top_of(plain, episodes), SPEC, folder / "run", seed=1)


def on_top_of(plain: Path, episodes: Path) -> FitConfig:
    return config(episodes, **KEPT, start_from=str(plain), inverse=INVERSE, save_every=50)


def clips_of(folder: Path, world_model: WorldModel, tmp_path: Path) -> ClipDataset:
    dataset = open_episodes(DatasetConfig(path=str(folder)), SPEC)
    frames = EpisodeFrames.of(dataset, 4, SPEC.action_low, SPEC.action_high)
    metadata, encoded = world_model.metadata, open_latents(frames, world_model.autoencoder, tmp_path)
    return ClipDataset([encoded], 3, np.array(metadata.state_mean), np.array(metadata.state_std))


def test_it_is_a_part_of_the_folder_and_nothing_else_changes(plain, fitted) -> None:
    before, after = weights(plain), weights(fitted)
    assert after.keys() - before.keys() == {"inverse.safetensors"}
    assert all(after[name] == data for name, data in before.items())
    begins, whole = load_world_model(fitted).check_inverse()
    assert 0 < begins < whole
    assert load_world_model(plain).inverse is None


def test_pairs_are_frames_one_after_another_with_the_actions_between(episodes, plain, tmp_path) -> None:
    clips = clips_of(episodes, load_world_model(plain), tmp_path)
    part = clips.parts[0]
    before, after, actions = real_pairs(clips, 32, seed=0, step=3)
    assert len(before) == len(after) == len(actions.values) > 32 and actions.executed.any(-1).all()
    stored = torch.from_numpy(part.latents.astype(np.float32))
    for row in range(0, len(before), 7):
        (here,) = torch.nonzero((stored == after[row]).flatten(1).all(1)).T
        found = [i for i in here.tolist() if part.frames.number[i] and torch.equal(stored[i - 1], before[row])]
        values, _ = part.frames.actions(torch.tensor(found).numpy())
        assert any(torch.equal(torch.from_numpy(one), actions.values[row, 0]) for one in values)


def test_a_killed_one_goes_on_to_the_same_result_and_another_fit_keeps_it(episodes, plain, fitted, tmp_path) -> None:
    options = on_top_of(plain, episodes)
    folder = Path(shutil.copytree(fitted.parents[1] / "killed", tmp_path / "run"))
    assert updates_kept(options, folder) == 50
    assert weights(fit(options, SPEC, folder, seed=1)) == weights(fitted)
    kept = fit(config(episodes, **KEPT, start_from=str(fitted)), SPEC, tmp_path / "kept", seed=1)
    assert weights(kept) == weights(fitted)


def test_one_that_tells_no_actions_apart_is_left_out(episodes, fitted, tmp_path, monkeypatch, caplog) -> None:
    world_model = load_world_model(fitted)
    pairs = real_pairs(clips_of(episodes, world_model, tmp_path), 64, 0, 0)
    none = Actions(torch.zeros_like(pairs[2].values), pairs[2].executed)
    monkeypatch.setattr(inverse_module, "real_pairs", lambda *_: (*pairs[:2], none))
    calibrate_inverse(world_model, clips_of(episodes, world_model, tmp_path), seed=0)
    assert world_model.inverse is None and world_model.metadata.inverse_errors is None
    assert "inverse: on real frames the actions that it reads are hardly nearer" in caplog.text
    with pytest.raises(ConfigError, match="no inverse dynamics"):
        world_model.check_inverse()


def test_it_is_not_fitted_on_episodes_that_judge_it(episodes) -> None:
    with pytest.raises(ValueError, match=r"cross_fit: got 2 with .*inverse\.steps"):
        config(episodes, cross_fit=2, inverse=INVERSE)
