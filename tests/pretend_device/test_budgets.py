"""Acting, learning and imagining make the host wait, and copy, no more often than is written down in `budgets.py`."""

from __future__ import annotations

import pytest
import torch
from representatives import slow_but_for

from pretend_device import budgets, pretending
from pretend_device.budgets import Budget, budget
from vla_rl.policies.openvla.network.network import OpenVLANetwork


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


@pytest.fixture(scope="module")
def world_model(tmp_path_factory):
    return budgets.fitted_world_model(tmp_path_factory.mktemp("budgets"))


def assert_within(counted: Budget, allowed: Budget, where: str = "") -> None:
    over = [f for f, a, b in zip(Budget._fields, counted, allowed, strict=True) if a > b]
    assert not over, f"counted {counted}, allowed {allowed}\n{where}"


def need(name: str) -> None:
    if "smolvla" in name:
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")


@pytest.mark.parametrize("name", budgets.ACT)
def test_an_act(name):
    need(name)
    counts = budgets.count_act(name)
    assert counts.totals["downloads"] > 0, "actions come to the host"
    assert_within(budget(counts), budgets.ACT[name], counts.places())


# Both kinds of policy, with values; how policies differ otherwise is counted in an act.
@pytest.mark.parametrize("name", slow_but_for(("ppo", "ppo-smolvla"), budgets.STEP))
def test_an_optimizer_step_and_an_update(name):
    need(name)
    step, update = budgets.count_learning(name)
    assert_within(step, budgets.STEP[name])
    assert_within(update, budgets.UPDATE[name])


def test_a_fits_updates(tmp_path):
    found = budgets.count_fits(tmp_path)
    assert found.keys() == budgets.FIT.keys()
    for name, counts in found.items():
        assert_within(budget(counts), budgets.FIT[name], counts.places())


@pytest.mark.parametrize("name", budgets.IMAGINED)
def test_an_imagined_step(name, world_model):
    counts = budgets.count_imagined(name, world_model)
    assert counts.totals["uploads"] > 0, "actions go to the device"
    assert_within(budget(counts), budgets.IMAGINED[name], counts.places())


@pytest.mark.parametrize(
    "waste",
    [lambda x: x.mean().item(), lambda x: x + torch.tensor([1.0], device=x.device)],
    ids=["a number is read", "a constant is copied"],
)
def test_a_wait_or_a_copy_that_is_added_is_found(monkeypatch, waste):
    forward = OpenVLANetwork.hidden

    def hidden(self, *args, **kwargs):
        made = forward(self, *args, **kwargs)
        waste(made)
        return made

    monkeypatch.setattr(OpenVLANetwork, "hidden", hidden)
    with pytest.raises(AssertionError, match="allowed"):
        test_an_act("openvla-parallel")
