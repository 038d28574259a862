"""The guard of a refit: the shipped world model fitted badly on purpose, which must not cost what it knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sim.tabletop import TabletopConfig
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.fit import fit as fit_module
from world_model.fit import replay as guard_module
from world_model.fit.config import FitConfig
from world_model.fit.fit import fit
from world_model.fit.replay import compare_order
from world_model.metadata import WorldModelMetadata
from world_model.model.world_model import WorldModel, load_world_model

ENV = TabletopConfig(num_envs=8, tasks=("push_to_zone",), steps_after_success=8)
GENTLE, RUINOUS = ({"steps": 2, "batch_size": 4, "optim": {"warmup_steps": 1, "lr": lr}} for lr in (1e-6, 3.0))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    """Of an expert that fails now and then."""
    folder = tmp_path_factory.mktemp("guard") / "episodes"
    config = CollectConfig(
        dataset=str(folder), episodes_per_task=16, start_index=9000, noise=0.5, noise_hold=6, keep="all"
    )
    collect_dataset(ENV, config)
    return folder


def refitted(episodes: Path, folder: Path, **options: Any) -> tuple[WorldModel, WorldModelMetadata]:
    values = {"datasets": str(episodes), "start_from": "pretrained:tabletop", "holdout": 0.7, "clip_frames": 3}
    values |= {"autoencoder": {"steps": 0}, "dynamics": GENTLE, "success": GENTLE, "precision": "fp32"}
    values |= {"max_false_success": 0.99, "min_failures": 1, "imagined_episodes": 2, "sampling_steps": 1}
    world_model = load_world_model(fit(FitConfig.model_validate(values | options), ENV.env_spec(), folder))
    return world_model, world_model.metadata


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("part", "networks"), [("dynamics", ["dynamics"]), ("success", ["success", "clip"])])
def test_a_ruinous_refit_is_put_back_and_said(episodes, tmp_path, caplog, part, networks):
    start = load_world_model("pretrained:tabletop")
    world_model, metadata = refitted(episodes, tmp_path / "run", **{part: RUINOUS})
    refit = metadata.refits[part]
    assert refit["put_back"] and refit["change"]["high"] < 0 and refit["before"]["value"] > 0.75
    assert f"world_model.{part}: the fit made it worse at telling successes from failures on 11 episodes" in caplog.text
    for name in ("dynamics", "success", "clip"):
        assert same(getattr(world_model, name), getattr(start, name)) == (name in networks), name
    other = metadata.refits["success" if part == "dynamics" else "dynamics"]
    assert not other["put_back"]
    known = metadata.calibration["probability"]["cross_fitted"]["auc"]
    assert known > 0.7, "thresholds and probability are of the parts that were kept"


def test_what_is_not_fitted_is_not_compared_and_what_moved_chooses_other_thresholds(episodes, tmp_path, monkeypatch):
    replays: list[int] = []
    for module in (guard_module, fit_module):
        replay = module.replay_logits
        monkeypatch.setattr(module, "replay_logits", lambda *a, replay=replay: replays.append(1) or replay(*a))
    none, found = {"steps": 0}, {}
    for cross_fit, num_episodes in ((0, 11), (2, 16)):  # Where nothing is fitted, all of them choose.
        replays.clear()
        folder = tmp_path / str(cross_fit)
        _, found[cross_fit] = refitted(episodes, folder, dynamics=none, success=none, cross_fit=cross_fit)
        assert found[cross_fit].refits == {} and len(replays) == 1, "imagined once, to choose the thresholds"
        assert found[cross_fit].calibration["num_episodes"] == num_episodes
    moved = {"steps": 6, "batch_size": 8, "optim": {"warmup_steps": 1, "lr": 3e-4}}
    _, after = refitted(episodes, tmp_path / "after", dynamics=moved, success=none)
    before = found[0]
    assert before.calibrated_on == after.calibrated_on
    assert after.refits.keys() == {"dynamics"} and not after.refits["dynamics"]["put_back"]
    assert before.success_threshold != after.success_threshold, "also without steps of the success networks"
    assert before.success_probability != after.success_probability


def test_only_what_is_clearly_worse_is_put_back():
    rng = np.random.default_rng(0)
    real, groups = rng.random(200) < 0.4, np.arange(200)
    score = rng.normal(size=200) + 1.5 * real
    shaken = compare_order(score, score + 0.1 * rng.normal(size=200), real, groups)
    assert not shaken.put_back and shaken.change.low < 0 < shaken.change.high
    worse = compare_order(score, score - 1.0 * real, real, groups)
    assert worse.put_back and worse.change.high < 0
    assert not compare_order(score - 1.0 * real, score, real, groups).put_back
    few = rng.permutation(200)[:8]
    assert not compare_order(score[few], score[few] - 0.5 * real[few], real[few], groups[few]).put_back
    alike = compare_order(score, score, np.ones(200, bool), groups)
    assert not alike.put_back and np.isnan(alike.change.high), "without a failure there is no order"
    nothing = compare_order(score, np.where(groups == 3, np.nan, score), real, groups)
    assert nothing.put_back and nothing.after.value == 0.5
