"""Distilling the dummy's dynamics to one step of the flow: the result, what it cost, resuming, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from dummy_fit import KEPT, SPEC, STAGE, config, stop_fitting, weights

from vla_rl.config import ConfigError
from world_model.fit.distillation import check_distillation
from world_model.fit.fit import fit
from world_model.fit.stage import updates_kept
from world_model.interfaces import DynamicsConfig
from world_model.model.dynamics import TransformerConfig
from world_model.model.wan import WanConfig
from world_model.model.world_model import load_world_model


@pytest.fixture(scope="module")
def whole(episodes, tmp_path_factory) -> Path:
    """All stages, the dynamics with three steps of the flow, then distilled."""
    folder = tmp_path_factory.mktemp("distillation") / "run"
    return fit(config(episodes, sampling_steps=3, distillation=STAGE), SPEC, folder, seed=1)


def test_afterwards_it_imagines_in_one_step_and_says_what_that_cost(episodes, whole, tmp_path) -> None:
    plain = fit(config(episodes, sampling_steps=3), SPEC, tmp_path / "plain", seed=1)
    before, after = weights(plain), weights(whole)
    assert {name for name in before if before[name] != after[name]} == {"dynamics.safetensors"}
    assert load_world_model(plain).dynamics.config.sampling_steps == 3
    found = load_world_model(whole)
    assert found.dynamics.config.sampling_steps == 1 and found.dynamics.config.temperature == 1
    cost = found.metadata.refits["distillation"]
    assert found.metadata.refits.keys() == {"distillation"} and not cost["put_back"]
    change = cost["after"]["value"] - cost["before"]["value"]
    assert cost["change"]["value"] == pytest.approx(change) and cost["change"]["n"] == 6
    assert load_world_model(plain).metadata.refits == {}


def test_a_stopped_one_goes_on_to_the_same_result(episodes, whole, tmp_path, monkeypatch) -> None:
    options, run = config(episodes, sampling_steps=3, distillation=STAGE), tmp_path / "run"
    budget = stop_fitting(monkeypatch, 14)  # Four stages of three updates, then two more.
    with pytest.raises(KeyboardInterrupt):
        fit(options, SPEC, run, seed=1)
    assert updates_kept(options, run) == 14
    budget[0] = 1
    assert weights(fit(options, SPEC, run, seed=1)) == weights(whole)


def test_of_a_start_it_is_the_only_thing_that_changes(episodes, whole, tmp_path) -> None:
    options = config(episodes, **KEPT, start_from=str(whole), sampling_steps=2, distillation=STAGE)
    again = fit(options, SPEC, tmp_path / "run")
    assert {n for n, data in weights(again).items() if data != weights(whole)[n]} == {"dynamics.safetensors"}
    assert load_world_model(again).metadata.datasets == load_world_model(whole).metadata.datasets


def test_what_cannot_be_distilled_is_refused_before_anything_is_fitted(episodes, tmp_path) -> None:
    wan = WanConfig.model_validate({"transformer": {}})
    with pytest.raises(ConfigError, match=r"world_model\.distillation\.steps: not for dynamics of kind 'wan'"):
        check_distillation(wan)
    with pytest.raises(ConfigError, match="not for dynamics of kind 'mine'"):
        check_distillation(DynamicsConfig(kind="mine"))
    check_distillation(TransformerConfig())
    with pytest.raises(ConfigError, match=r"world_model\.sampling_steps: got 1 with distillation.*such as 4"):
        fit(config(episodes, sampling_steps=1, distillation=STAGE), SPEC, tmp_path / "run")
    with pytest.raises(ValueError, match=r"cross_fit: got 2 with .*distillation\.steps"):
        config(episodes, cross_fit=2, distillation=STAGE)
