"""A world model is fitted, imagines and is judged on the device as on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretend_device import pretending
from pretend_device.imagined import ENV, collect, fit_config, make_env, more_parts, wan_frames
from vla_rl.types import EpisodeSpec
from world_model.fit import fit as fit_module
from world_model.fit.fit import fit
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.evaluate import measure_trust
from world_model.trust.report import TrustReport

DEVICES = ("cpu", "pretend")


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> dict[str, Path]:
    """A world model by device, of the same episodes."""
    root = tmp_path_factory.mktemp("on_device")
    config = fit_config(collect(root / "episodes"))
    return {device: fit(config, ENV.env_spec(), root / device, seed=1, device=device) for device in DEVICES}


def test_a_fit_learns_the_same_weights(fitted):
    here, there = (load_world_model(fitted[device]).state_dict() for device in DEVICES)
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert (value.float() - there[name].float()).abs().max() < 1e-3, name


def test_parts_added_to_it_learn_the_same_weights(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "calibrate_objects", lambda *_: None)  # After so few updates they tell nothing
    monkeypatch.setattr(fit_module, "calibrate_inverse", lambda *_: None)  # and would be left out.
    config = more_parts(collect(tmp_path / "episodes", objects=True), fitted["cpu"])
    made = [fit(config, ENV.env_spec(), tmp_path / device, seed=1, device=device) for device in DEVICES]
    here, there = (load_world_model(folder).state_dict() for folder in made)
    assert here.keys() == there.keys() > {"inverse.mean", "objects.arm.gains"}
    for name, value in here.items():
        assert (value.float() - there[name].float()).abs().max() < 1e-3, name


def test_imagined_episodes_are_the_same(fitted):
    seen: dict[str, list[Any]] = {}
    for device in DEVICES:
        env = make_env(fitted["cpu"], device, ensemble=2, dual_noise=1)
        specs = [EpisodeSpec("reach_red", "train", i) for i in range(4)]
        results = [env.reset(specs).images["agentview"]]
        actions = np.random.default_rng(0).uniform(-1, 1, (4, 4, env.spec.action_dim)).astype(np.float32)
        for _ in range(2):
            step = env.step(actions)
            results += [step.obs.images["agentview"], step.obs.state, step.info["disagreement"], step.success]
        seen[device] = results
        env.close()
    for here, there in zip(seen["cpu"], seen["pretend"], strict=True):
        if here.dtype == np.uint8:
            assert np.abs(here.astype(int) - there).max() <= 1
        else:
            np.testing.assert_allclose(there, here, atol=1e-3)


@pytest.mark.slow
def test_trust_measures_the_same(fitted, tmp_path):
    held_out = collect(tmp_path / "held_out", start_index=700)
    reports = {}
    for device in DEVICES:
        options = MeasureConfig(inverse_updates=4)
        measure_trust(options, fitted["cpu"], [held_out], device=device, folder=tmp_path / device)
        reports[device] = TrustReport.load(tmp_path / device / "trust.json").figures
    assert reports["cpu"].keys() == reports["pretend"].keys()
    for name, figure in reports["cpu"].items():  # Of 280 pairs a few change places where probabilities nearly agree.
        assert reports["pretend"][name].value == pytest.approx(figure.value, rel=1e-2, abs=2e-2, nan_ok=True), name


def test_wan_imagines_the_same():
    pytest.importorskip("diffusers")
    here, there = (wan_frames(device) for device in DEVICES)
    torch.testing.assert_close(there.latents.cpu(), here.latents, atol=1e-4, rtol=1e-4)
