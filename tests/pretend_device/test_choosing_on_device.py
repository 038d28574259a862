"""A frozen policy on the device beside a critic that learns on the host: what `run: online` acts with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretend_device import pretending
from vla_rl.algorithms.offpolicy.networks import CriticNetworks, EditPolicy
from vla_rl.algorithms.offpolicy.noise import NoiseActor, NoiseSteeredPolicy, SteeredPolicy
from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy
from vla_rl.common.row_noise import RowGenerator
from vla_rl.interfaces import Policy
from vla_rl.policies.fake_input import fake_observation
from vla_rl.workflows.gpu_bench.policy_matrix import SPEC, build

CLOSE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


@pytest.fixture(autouse=True)
def lerobot_knows_the_device(monkeypatch):
    """It takes another device for one that it does not know by name."""
    monkeypatch.setattr("lerobot.configs.policies.is_torch_device_available", lambda device: True)


def around(base: Policy, steered: bool) -> ValueGuidedPolicy:
    """The policy with networks of this seed, which stay on the host."""
    obs = fake_observation(SPEC, 1)
    place, chunk = base.embed(obs).shape[1], base.chunk_size * base.action_dim
    torch.manual_seed(0)
    critic = CriticNetworks.empty(place, chunk, 8, 2)
    if not steered:
        return ValueGuidedPolicy(base, critic, EditPolicy(place, chunk, 8, 0.1), 3)
    assert isinstance(base, NoiseSteeredPolicy)
    return SteeredPolicy(base, critic, NoiseActor(place, base.noise_shape, 8, 2.0))


def noise(rows: int) -> RowGenerator:
    generator = RowGenerator()
    generator.rows = [torch.Generator().manual_seed(row) for row in range(rows)]
    return generator


CASES = [("openvla-parallel", False), ("openvla-autoregressive", False), ("smolvla-sde", False), ("smolvla-sde", True)]


@pytest.mark.parametrize(("name", "steered"), CASES)
def test_it_chooses_what_it_chooses_on_the_host(name: str, steered: bool) -> None:
    if name == "smolvla-sde":
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    obs = fake_observation(SPEC, 2)
    here, there = (around(build(name, place), steered) for place in ("cpu", "pretend"))
    for temperature in (0.0, 1.0):
        expected, found = (policy.act(obs, noise(2), temperature) for policy in (here, there))
        assert found.value is not None and expected.value is not None
        np.testing.assert_allclose(found.actions, expected.actions, atol=CLOSE)
        np.testing.assert_allclose(found.value, expected.value, atol=CLOSE)
