"""A world model conditioned on the simulated body: fitted on the tabletop's episodes, replayed; and what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dummy_fit import ENV, MODEL, STAGE, collect, config

from sim.tabletop.env import TabletopConfig
from sim.vector.processes import simulated_body
from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.data.body_moves import with_body_moves
from world_model.data.episodes import open_episodes
from world_model.env.planning import check_fits
from world_model.fit.fit import fit
from world_model.metadata import read_metadata
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.evaluate import measure_trust

TABLETOP = TabletopConfig(tasks=("pick_place",), num_envs=4, num_workers=0, cameras=("agentview",), image_size=32)
SPEC = TABLETOP.env_spec()
BODY = {"kind": "tabletop", "image_size": 32}
OF_BODY = {**MODEL, "dynamics": {**MODEL["dynamics"], "kinematics": "body"}}


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("body") / "episodes"
    values = {"dataset": str(folder), "episodes_per_task": 16, "keep": "all", "noise": 0.3, "noise_hold": 4}
    collect_dataset(TABLETOP, CollectConfig.model_validate(values))
    return folder


@pytest.fixture(scope="module")
def untrained(episodes, tmp_path_factory) -> Path:
    """A world model whose dynamics has learned nothing: it adds nothing to what the body does."""
    section = config(episodes, model=OF_BODY, dynamics={**STAGE, "steps": 0})
    return fit(section, SPEC, tmp_path_factory.mktemp("body") / "run", needs_threshold=False, env=TABLETOP)


def test_recorded_actions_move_the_body_as_they_moved_the_robot(episodes, monkeypatch):
    dataset = open_episodes(DatasetConfig(path=str(episodes)), SPEC, body=BODY)
    assert dataset.body_moves is not None and dataset.body_moves.shape == dataset.state.shape
    off = []
    for start in dataset.starts:
        moved = dataset.state[start] + dataset.body_moves[start : start + 5].cumsum(0)
        off.append(np.abs(moved - dataset.state[start + 1 : start + 6]).max())
    assert np.median(off) < 1e-5  # Few touch something in their first steps.
    monkeypatch.setattr(TabletopConfig, "build_body", None)
    again = open_episodes(DatasetConfig(path=str(episodes)), SPEC, body=BODY)  # Kept, so not replayed again.
    np.testing.assert_array_equal(again.body_moves, dataset.body_moves)


def test_a_dynamics_that_adds_nothing_imagines_the_robot_as_the_simulator_moves_it(untrained):
    assert read_metadata(untrained)[1].body == BODY
    section = {"kind": "world_model", "path": str(untrained), "first_frames": TABLETOP.model_dump(), "num_envs": 2}
    env = build_component("env", {**section, "trust": {"ignore": True}, "imagination": {"horizon": 40}}).build()
    env.world_model.metadata = env.world_model.metadata.model_copy(update={"success_threshold": 1e6})  # Never.
    real, specs = TABLETOP.build(2), [EpisodeSpec("pick_place", "train", i) for i in (3, 4)]
    actions = np.random.default_rng(0).uniform(-0.4, 0.4, (2, 16, 7)).astype(np.float32)
    actions[..., 2] = np.abs(actions[..., 2])
    env.reset(specs)
    real.reset(specs)
    for chunk in (actions[:, :6], actions[:, 6:]):  # A frame is 4 control steps: its last may be half of one.
        imagined, simulated = env.step(chunk).obs.state, real.step(chunk).obs.state
        np.testing.assert_allclose(imagined, simulated, atol=1e-5)
        moment = env.save_state()
    env.reset([replace(spec, keyframe=at) for spec, at in zip(specs, moment, strict=True)])
    np.testing.assert_allclose(env.step(actions[:, :6]).obs.state, real.step(actions[:, :6]).obs.state, atol=1e-5)
    env.close()
    real.close()


def test_trust_and_further_fits_replay_their_episodes_by_themselves(episodes, untrained, tmp_path):
    other = tmp_path / "held_out"
    values = {"dataset": str(other), "episodes_per_task": 8, "keep": "all", "noise": 0.3, "start_index": 500}
    collect_dataset(TABLETOP, CollectConfig.model_validate(values))
    measured = measure_trust(MeasureConfig(inverse_updates=2, auc_frames=0), untrained, [other], folder=tmp_path)
    assert measured.is_file()
    section = config(other, start_from=str(untrained), model=None, autoencoder={"steps": 0}, success={"steps": 0})
    after = fit(section, SPEC, tmp_path / "further", needs_threshold=False)
    assert read_metadata(after)[1].body == BODY


def test_a_fit_that_goes_on_in_another_scene_takes_the_body_that_moves_there(episodes, untrained, tmp_path):
    kept = {"model": None, "autoencoder": {"steps": 0}, "dynamics": {"steps": 0}, "success": {"steps": 0}}
    section, there = config(episodes, start_from=str(untrained), **kept), TABLETOP.model_copy(update={"looks": 0.3})
    known = fit(section, there.env_spec(), tmp_path / "known", needs_threshold=False, env=there)
    assert read_metadata(known)[1].body == BODY
    moved = replace(there.env_spec(), projections={name: p + 0.2 for name, p in SPEC.projections.items()})
    other = fit(section, moved, tmp_path / "other", needs_threshold=False, env=there)
    assert read_metadata(other)[1].body == {**BODY, "looks": 0.3}
    with pytest.raises(ConfigError, match=r"dynamics\.kinematics: got 'body', .* not none"):
        fit(section, moved, tmp_path / "none", needs_threshold=False)


def test_what_cannot_tell_where_the_body_is_is_refused(episodes, untrained, tmp_path):
    section = config(episodes, model=OF_BODY)
    with pytest.raises(
        ConfigError, match=r"dynamics\.kinematics: got 'body'.*not .*DummyConfig.; set it to delta_pose"
    ):
        fit(config(collect(tmp_path / "dummy"), model=OF_BODY), ENV.env_spec(), tmp_path / "run", env=ENV)
    with pytest.raises(ConfigError, match=r"objects\.steps.*kinematics=body; set 0"):
        objects = section.objects.model_validate({"steps": 2, "batch_size": 2})
        fit(section.model_copy(update={"objects": objects}), SPEC, tmp_path, env=TABLETOP)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(episodes, elsewhere)
    dataset = replace(open_episodes(DatasetConfig(path=str(elsewhere)), SPEC), cache=tmp_path / "cache")
    dataset.initial_states[3] = "a person's"
    with pytest.raises(DatasetError, match=r"episode 3 began at .a person's., which is no initial state of tabletop"):
        with_body_moves(dataset, BODY)
    assert not list(tmp_path.glob("cache_body*"))
    recorded = {"kind": "world_model", "path": str(untrained), "datasets": str(episodes), "trust": {"ignore": True}}
    with pytest.raises(ConfigError, match=r"env\.path: .* kinematics=body.*not none"):
        build_component("env", {**recorded, "imagination": {"horizon": 40}}).build()
    with pytest.raises(ValueError, match=r"plan\.world_model: was fitted with kinematics=body"):
        check_fits(load_world_model(untrained), None, "plan.world_model")


def test_many_episodes_are_replayed_in_processes_with_the_same_moves(episodes, monkeypatch):
    alone = open_episodes(DatasetConfig(path=str(episodes)), SPEC, body=BODY)
    shutil.rmtree(next(alone.cache.parent.glob("*_body_*")))
    built = []
    monkeypatch.setattr("world_model.data.body_moves.AT_ONCE", 7)
    monkeypatch.setattr(TabletopConfig, "build_body", lambda env: built.append(env.num_workers) or simulated_body(env))
    shared = open_episodes(DatasetConfig(path=str(episodes)), SPEC, body=BODY)
    assert built == [min(8, os.cpu_count() or 1)]
    np.testing.assert_array_equal(shared.body_moves, alone.body_moves)
