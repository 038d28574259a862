"""Cross-fitting: every episode teaches, and chooses thresholds by the scores of parts that have not seen it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dummy_fit import ENV, MODEL

from vla_rl.common import progress
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import EpisodeDataset
from world_model.data.episodes import open_episodes
from world_model.fit import fit as fit_module
from world_model.fit.config import FitConfig
from world_model.fit.data import FitData
from world_model.fit.fit import fit
from world_model.model.world_model import load_world_model

STAGE, NONE = {"steps": 2, "batch_size": 4, "optim": {"warmup_steps": 1}}, {"steps": 0}


def config(episodes: Path, **options: Any) -> FitConfig:
    values = {"model": MODEL, "datasets": str(episodes), "clip_frames": 4, "cross_fit": 2, "precision": "fp32"}
    values |= {"autoencoder": NONE, "dynamics": STAGE, "success": STAGE, "max_false_success": 0.99, "min_failures": 1}
    return FitConfig.model_validate(values | options)


def test_every_episode_teaches_and_chooses(episodes, held_out, tmp_path, monkeypatch):
    scored: list[set[str]] = []
    replay = fit_module.replay_logits

    def noting(world_model: Any, judged: Any, seed: int) -> Any:
        scored.append({episode.start for episode in judged})
        return replay(world_model, judged, seed)

    monkeypatch.setattr(fit_module, "replay_logits", noting)
    fitted = load_world_model(fit(config(episodes), ENV.env_spec(), tmp_path / "run", seed=1))
    assert fitted.metadata.calibration["num_episodes"] == 24
    assert fitted.metadata.calibrated_on == fitted.metadata.datasets
    assert [len(states) for states in scored] == [12, 12], "each episode by the fold that left it out, and never again"
    assert scored[0].isdisjoint(scored[1])
    assert not (tmp_path / "run" / "folds").exists()
    whole = config(episodes, cross_fit=0, calibrate_on=str(held_out))
    same = load_world_model(fit(whole, ENV.env_spec(), tmp_path / "whole", seed=1))
    for name, tensor in fitted.dynamics.state_dict().items():
        assert np.array_equal(tensor, same.dynamics.state_dict()[name]), "the result is fitted on all of them"


def test_each_stage_and_fold_tells_how_far_it_is(episodes, tmp_path, monkeypatch, capsys):
    """In a file, where its line is due."""
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    fit(config(episodes), ENV.env_spec(), tmp_path / "run", seed=1, show=True)
    said = [re.sub(r"[━╸╺]+", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert all(re.search(r" [012]/2 +\d+\.\d steps/s ", line) for line in said)
    ends = [" ".join(line.split(" 2/2")[0].split()) for line in said if re.search(r" 2/2 .* loss \d", line)]
    folds = [f"{stage}, fold {fold} of 2" for fold in (1, 2) for stage in ("dynamics", "success", "clip")]
    assert [*dict.fromkeys(ends)] == [*folds, "dynamics", "success", "clip"]


def test_a_fold_learns_from_no_episode_that_it_scores(episodes):
    options, spec = config(episodes), ENV.env_spec()
    for fold in (0, 1):
        data = FitData.open(options, spec, 4, seed=1, fold=fold)
        taught, judged = (set(part[0].episodes.tolist()) for part in (data.fitted, data.calibration))
        assert taught.isdisjoint(judged) and len(taught | judged) == 24
        assert [set(part.episodes.tolist()) for part in data.judged] == [taught]
    everything = FitData.open(options, spec, 4, seed=1)
    assert len(everything.fitted[0].episodes) == len(everything.calibration[0].episodes) == 24


def test_folds_are_of_whole_initial_states(episodes):
    dataset: EpisodeDataset = open_episodes(DatasetConfig(path=str(episodes)), ENV.env_spec())
    for number in range(len(dataset.initial_states)):
        dataset.initial_states[number] = f"s{number // 4}"
    folds = [dataset.fold(number, 3, [0]) for number in range(3)]
    states = [{dataset.initial_states[e] for e in held.episodes} for _, held in folds]
    assert [len(found) for found in states] == [2, 2, 2] and len(set.union(*states)) == 6
    with pytest.raises(DatasetError, match="6 initial states; 7 folds"):
        dataset.fold(0, 7, [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_fit": 1}, "cross_fit: got 1"),
        ({"calibrate_on": "others"}, "got 2 with calibrate_on"),
        ({"autoencoder": STAGE}, "got 2 with autoencoder.steps"),
        ({"value": STAGE}, "got 2 with value.steps"),
    ],
)
def test_what_would_judge_itself_is_refused(episodes, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        config(episodes, **options)
